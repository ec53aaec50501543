"""HTTP with JSON over a Unix socket, as a client speaks it.

It is HTTP/1.0 with a connection for each request: an answer without a length ends with its connection. The
standard library's http.client would take a fifth of the time in which a command starts.

Everything raises DaemonUnreachable when nobody answers or the answer breaks off, and otherwise the error that
was sent (see `lorad.errors`).
"""

import contextlib
import json
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from lorad import __version__
from lorad.errors import DaemonUnreachable, LoradError, SpecError, from_wire

Json = dict[str, Any]  # an object of an answer, before `Client` makes a Struct of it
_CUT_OFF = (OSError, EOFError, ValueError)  # what an answer that ends too early raises
RESTART = "Start it with `lorad daemon start`."
PROTOCOL = 1  # version of the API; it changes when older clients would misunderstand it, or be misunderstood
PROTOCOL_HEADER = "X-Lorad-Protocol"
VERSION_HEADER = "X-Lorad-Version"
EXPORTED_HEADER = "X-Lorad-Exported"  # run@version of an archive, which `best` may have named
LINES = "application/x-ndjson"  # an answer in lines of JSON
_QUEUED = 10  # seconds for a connection
_TIMEVAL = struct.Struct("ll")  # struct timeval
_LINE = 1 << 16  # bytes of a header


class _HttpAnswer(NamedTuple):
    """An answer of the daemon.

    headers: the headers, with names in lower case.
    file: a file from which the body is read.
    """

    status: int
    headers: dict[str, str]
    file: BufferedReader

    def read(self) -> bytes:
        """Read the whole body. Raises EOFError where only a part of it comes."""
        length = int(self.headers.get("content-length", -1))
        data = self.file.read(length)
        if len(data) < length:
            raise EOFError(f"{len(data)} of {length} bytes came")
        return data


class Transport:
    """Sends requests to the daemon of one socket, each by a connection of its own, and so from any thread.

    on_other_version: called once with the version of a daemon that has another than this program, or "" where
        it does not say; and with the name of its box, "" for this machine.
    on_dead: called with a socket that a daemon left behind when it died (one that was stopped removes it),
        to start one; then the request goes out.
    on_wait: called with what is waited for before a daemon answers, again and again, and with "" at the end.
    on_doing: called with what the daemon does about a request, again and again, and with "" at the end.
    """

    on_other_version: ClassVar[Callable[[str, str], None] | None] = None
    on_dead: ClassVar[Callable[[Path], None] | None] = None
    on_wait: ClassVar[Callable[[str], None] | None] = None
    on_doing: Callable[[str], None] | None = None

    def __init__(self, socket_path: Path, timeout: float) -> None:
        self.socket = socket_path
        self.timeout = timeout
        self.restart = RESTART  # what to do where no daemon answers
        self.box_name = ""
        self.version = __version__  # of the daemon that answered last

    def ask(self, method: str, path: str, body: msgspec.Struct | None = None) -> Json:
        """Send a request, and read the one object of its answer."""
        answer = self.request(method, path, body)
        try:
            with answer.file:
                is_whole = answer.headers.get("content-type") != LINES
                content: Json = json.loads(answer.read()) if is_whole else self._last_of(answer)
        except _CUT_OFF as error:
            raise self.broken(method, path, error) from error
        if not is_whole and content["status"] >= 400:
            raise from_wire(content["body"]["error"])
        return content if is_whole else content["body"]

    def _last_of(self, answer: _HttpAnswer) -> Json:
        """Read an answer in lines, of which the last one counts, and pass the others on. Raises EOFError."""
        on_doing = self.on_doing or (lambda _: None)
        try:
            for line in answer.file:
                content: Json = json.loads(line)
                if "doing" not in content:
                    return content
                on_doing(content["doing"])
        finally:
            on_doing("")
        raise EOFError("the answer has no end")

    def stream(self, method: str, path: str, body: msgspec.Struct | None) -> Iterator[Json]:
        """Send a request, and yield the objects of its answer as they come."""
        answer = self.request(method, path, body)
        try:
            with answer.file:
                for line in answer.file:
                    yield json.loads(line)
        except _CUT_OFF as error:
            raise self.broken(method, path, error) from error

    def broken(self, method: str, path: str, error: Exception) -> LoradError:
        """Say that an answer broke off."""
        return DaemonUnreachable(f"the daemon went away: {error}", hint=self.restart)

    def unanswered(self, method: str, path: str, error: Exception) -> LoradError:
        """Say that nobody answers a request."""
        return DaemonUnreachable(f"no daemon answers on {self.socket}: {error}", hint=self.restart)

    def request(self, method: str, path: str, body: msgspec.Struct | None) -> _HttpAnswer:
        """Send a request, and return its answer with the body still to be read."""
        try:
            data = b"" if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError as error:
            is_utf8 = sys.getfilesystemencoding() == "utf-8"
            hint = "Type it anew." if is_utf8 else "This locale is not in UTF-8: set LC_ALL=C.UTF-8."
            raise SpecError(f"{error.object!r} is no text in UTF-8", hint=hint) from error
        try:
            answer = self._asked(method, path, data)
        except _CUT_OFF as error:
            raise self.unanswered(method, path, error) from error
        self.version = answer.headers.get(VERSION_HEADER.lower(), "")
        if self.version != __version__:
            report = Transport.on_other_version
            Transport.on_other_version = None
            if report is not None:
                report(self.version, self.box_name)
        if answer.status >= 400:
            try:
                with answer.file:
                    text = answer.read()
            except _CUT_OFF as error:
                raise self.broken(method, path, error) from error
            try:
                wired: dict[str, str] = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                message = f"the daemon answered {answer.status}: {text[:200]!r}"
                wired = {"kind": "LoradError", "message": message, "hint": ""}
            raise from_wire(wired)
        return answer

    def _asked(self, method: str, path: str, data: bytes) -> _HttpAnswer:
        """Send a request and read the head of its answer. Raises what is in _CUT_OFF."""
        lines = [f"{method} {path} HTTP/1.0", "Host: lorad", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(data)}", f"{PROTOCOL_HEADER}: {PROTOCOL}"]
        lines += [f"Accept: {LINES}"] if self.on_doing is not None else []
        with self.connected() as connection:
            connection.settimeout(self.timeout)
            with contextlib.suppress(BrokenPipeError):  # refused before it was read: the answer says why
                connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii") + data)
            file = connection.makefile("rb")  # which keeps the connection
        try:
            if not (first := file.readline(_LINE)):
                raise EOFError("the connection was closed")
            _, status, *_ = first.split()
            headers = {}
            while (line := file.readline(_LINE)).strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
            return _HttpAnswer(int(status), headers, file)
        except BaseException:
            file.close()
            raise

    def connected(self) -> socket.socket:
        """Return a connection to the daemon. Raises what is in _CUT_OFF."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, connection: socket.socket) -> None:
        """Connect, and wait in the kernel's queue where others do so, too. Raises what is in _CUT_OFF.

        With a timeout of Python's, the socket would be turned away from a full queue.
        """
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_QUEUED, 0))
        try:
            connection.connect(str(self.socket))
        except BlockingIOError as error:
            raise DaemonUnreachable(
                f"the daemon took no connection for {_QUEUED} seconds: too many wait, or it hangs",
                hint="Try again in a moment.",
            ) from error
        except ConnectionRefusedError:
            start = Transport.on_dead
            Transport.on_dead = None  # starting a daemon sends requests itself
            if start is None:
                raise
            try:
                start(self.socket)
            finally:
                Transport.on_dead = start
            connection.connect(str(self.socket))
