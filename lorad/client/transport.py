"""HTTP with JSON over a Unix socket, as a client speaks it. Standard library only.

Everything raises DaemonUnreachable when nobody answers or the answer breaks off, and otherwise the error that was sent
(see `lorad.errors`).
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

from lorad import __version__
from lorad.errors import DaemonUnreachable, from_wire

Json = dict[str, Any]
Items = list[Json]
CUT_OFF = (OSError, http.client.HTTPException, ValueError)  # what an answer that ends too early raises
RESTART = "Start it with `lorad daemon start`."
PROTOCOL = 1  # of the daemon's API: another number where clients of before would misunderstand it, or be misunderstood
PROTOCOL_HEADER, VERSION_HEADER = "X-Lorad-Protocol", "X-Lorad-Version"


class UnixConnection(http.client.HTTPConnection):
    """A connection to a socket in the filesystem."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("lorad", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Transport:
    """Cheap to make; safe to use from several threads (a connection per request).

    on_other_version: called once, with the version of a daemon that is not this one's, "" when it does not say.
    """

    on_other_version: ClassVar[Callable[[str], None] | None] = None

    def __init__(self, socket_path: Path, timeout: float) -> None:
        self.socket, self.timeout = socket_path, timeout

    def patient(self, timeout: float) -> Self:
        """The same with another timeout, in seconds."""
        other = copy.copy(self)
        other.timeout = timeout
        return other

    def get(self, path: str) -> Json:
        return self.one("GET", path, None)

    def post(self, path: str, body: Json) -> Json:
        return self.one("POST", path, body)

    def delete(self, path: str) -> Json:
        return self.one("DELETE", path, None)

    def list_of(self, path: str) -> Items:
        answer = self.one("GET", path, None)
        items: Items = answer["items"]
        return items

    def one(self, method: str, path: str, body: Json | None) -> Json:
        connection, response = self.request(method, path, body)
        try:
            answer: Json = json.loads(response.read())
        except CUT_OFF as error:
            raise DaemonUnreachable(f"the daemon went away: {error}", hint=RESTART) from error
        finally:
            connection.close()
        return answer

    def stream(self, method: str, path: str, body: Json | None) -> Iterator[Json]:
        connection, response = self.request(method, path, body)
        try:
            for line in response:
                yield json.loads(line)
        except CUT_OFF as error:
            raise DaemonUnreachable(f"the daemon went away: {error}", hint=RESTART) from error
        finally:
            connection.close()

    def request(
        self, method: str, path: str, body: Json | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = UnixConnection(self.socket, self.timeout)
        try:
            data = None if body is None else json.dumps(body)
            with contextlib.suppress(BrokenPipeError):  # refused before it was read: the answer says why
                headers = {"Content-Type": "application/json", PROTOCOL_HEADER: str(PROTOCOL)}
                connection.request(method, path, data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise DaemonUnreachable(f"no daemon answers on {self.socket}: {error}", hint=RESTART) from error
        if (version := response.headers.get(VERSION_HEADER, "")) != __version__:
            tell, Transport.on_other_version = Transport.on_other_version, None
            if tell is not None:
                tell(version)
        if response.status >= 400:
            text = response.read()
            connection.close()
            raise from_wire(_error_body(text, response.status))
        return connection, response


def _error_body(text: bytes, status: int) -> dict[str, str]:
    try:
        error: dict[str, str] = json.loads(text)["error"]
        return error
    except (ValueError, KeyError, TypeError):
        return {"kind": "LoradError", "message": f"the daemon answered {status}: {text[:200]!r}", "hint": ""}
