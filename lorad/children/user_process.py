"""Starts a process of user code under a guard, asks it, and ends it; `ask.py` is for asyncio.

User code may do anything without hurting the run: it gets no secrets, has its own limit of memory, and is
killed when its time is over. `user_code.py` is the other side.
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from lorad.bounds import CODE_BYTES
from lorad.box.machine import read_machine
from lorad.box.paths import python_path
from lorad.box.proxies import past_proxies
from lorad.children import guard
from lorad.children.spawn import spawn
from lorad.children.user_serve import Code, Ready
from lorad.errors import SpecError
from lorad.files import expanded, read_file

# lorad's own modules, and none of those beside them, in another interpreter
_APART = """
import importlib, json, sys, types
sys.path.pop(0)
if sys.version_info < (3, 10):
    sys.stdin.readline()
    said = "Python " + sys.version.split()[0] + " is too old"
    print(json.dumps({"error": said, "hint": "Name an interpreter of Python 3.10 or later."}))
    sys.exit()
lorad = sys.modules["lorad"] = types.ModuleType("lorad")
lorad.__path__ = [sys.argv[1]]
importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))
"""
_START_SECONDS = 60.0  # for the import of a file
_PRINTED_SECONDS = 1.0  # for what it printed last to be in the log
_GONE_SECONDS = 60.0  # for a guard whose pipes are closed to be gone; a busy machine may need seconds
_PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME"),
    *("CONDA_PREFIX", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
    *("LORAD_HOME", "LORAD_ATTEMPT"),  # by which what a run leaves is found
)
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")  # where this interpreter's modules are
_PASSED_PREFIXES = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_")
_FORM = "Name it path/to/file.py:function; relative paths start where the spec file is."
_BURST = 4 << 20  # bytes that it may print at once
_RATE = 256 << 10  # bytes that it may print in a second
_PART = 1 << 16
_PAUSE_SECONDS = 0.001  # between parts that are left out: reading them all must not take a core


class _ChildAnswer(Protocol):
    @property
    def is_last(self) -> bool: ...


_Message = TypeVar("_Message", bound=_ChildAnswer)
_Loaded = TypeVar("_Loaded", bound=Ready)


class Lost(Exception):
    """The child did not answer."""


class UserProcess:
    """A process under a guard, which ends all that user code started, with this process at the latest."""

    def __init__(
        self,
        module: str,
        what: str,
        environment: Mapping[str, str],
        python: Path | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """Start the process.

        module: The module that it runs.
        what: The kind of user code in errors, as "reward".
        python: Another interpreter, which gets nothing of lorad's but the module.
        within: A command in front of its own, see `sandboxed`.
        """
        self._what = what
        command = [sys.executable, "-P", "-m", module]
        if python is not None:
            command = [str(python), "-c", _APART, str(Path(guard.__file__).parents[1]), module]
            environment = {name: value for name, value in environment.items() if name not in _OURS}
        watched, self._lifeline = os.pipe()
        try:
            self._process, self._socket = spawn(
                [*within, *command, str(watched)],
                passed=[watched],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
                env=environment,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(watched)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in = self._process.stdin
        self._out = self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        assert self._process.stderr is not None
        self._printed = threading.Thread(
            target=_pass_on, args=(self._process.stderr, 2), name="printed", daemon=True
        )
        self._printed.start()
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def load(
        self, code: Code, key: str, kind: type[_Loaded], seconds: float = _START_SECONDS, hint: str = ""
    ) -> _Loaded:
        """Have the function imported within so many seconds. Raises SpecError, which blames `key`."""
        try:
            ready = self.ask(code, kind, seconds)
        except Lost as lost:
            problem = f"{lost} while {code.file} was imported"
            raise SpecError(problem, key=key, hint=f"Mend {Path(code.file).name}{hint}.") from None
        if ready.error:
            hint = ready.hint or "Mend the file; it is imported as a module."
            raise SpecError(ready.error, key=key, hint=hint)
        return ready

    def ask(
        self,
        message: Struct,
        answer: type[_Message],
        seconds: float,
        *,
        enc_hook: Callable[[Any], Any] = str,
        dec_hook: Callable[[type, Any], Any] | None = None,
    ) -> _Message:
        """Send a line and wait for the answer. Raises Lost when there is none within `seconds`.

        The hooks are msgspec's, for types that JSON lacks.
        """
        self.send(msgspec.json.encode(message, enc_hook=enc_hook))
        line = self.receive(time.monotonic() + seconds)
        if line is None:
            raise Lost(f"no result within {seconds:g} s")
        try:
            decoded = msgspec.json.decode(line, type=answer, dec_hook=dec_hook)
        except msgspec.MsgspecError:
            raise Lost(f"the {self._what} process answered out of turn") from None
        if decoded.is_last:
            self._end()
        return decoded

    def signal(self) -> None:
        """Kill it and, a moment later, all that user code started."""
        self._process.send_signal(guard.KILL_NOW)

    def kill(self) -> None:
        """End it and all that user code started, and have its last words in the log."""
        self._end()
        self._printed.join(_PRINTED_SECONDS)
        for pipe in (self._in, self._out, self._socket):
            pipe.close()
        os.close(self._lifeline)

    def _end(self) -> None:
        self.signal()
        try:
            self._process.wait(timeout=guard.END_SECONDS)
        except subprocess.TimeoutExpired:  # the guard itself is stopped, or waits for what cannot be killed
            self._process.kill()
            self._process.wait()

    def send(self, line: bytes) -> None:
        """Send a line, during the next `receive`."""
        self._unsent += line + b"\n"

    def receive(self, deadline: float, bell: int | None = None) -> bytes | None:
        """Wait for a line; return None at the deadline (time.monotonic()), or once `bell` can be read.

        `bell` is a file descriptor. Raises Lost when the process is gone.
        """
        while (end := self._received.find(b"\n")) < 0:
            left = deadline - time.monotonic()
            out = self._out.fileno()
            watched = [out] if bell is None else [out, bell]
            waiting = [self._in.fileno()] if self._unsent else []
            readable, writable, _ = select.select(watched, waiting, [], max(left, 0))
            if writable:
                try:
                    sent = os.write(self._in.fileno(), self._unsent)
                except BrokenPipeError:
                    raise Lost(self._death()) from None
                del self._unsent[:sent]
            if out in readable:
                chunk = os.read(out, 1 << 16)
                if not chunk:
                    raise Lost(self._death())
                self._received += chunk
            elif readable or not writable:
                return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _death(self) -> str:
        """Say how the process ended. Its guard has the same pipes, which are closed, and is ending."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_GONE_SECONDS)
        code = self._process.poll()
        if code is not None and (number := guard.killed_by(code)):
            return f"the {self._what} process died of {number.name}"
        return f"the {self._what} process exited with {code}"


def environment(variables: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Select the variables that user code gets, which programs need or the spec names; no secrets."""
    passed = {
        name: value
        for name, value in variables.items()
        if name in _PASSED
        or name in named
        or name.startswith(_PASSED_PREFIXES)
        or name.lower().endswith("_proxy")
    }
    return {**passed, **past_proxies(passed), "PYTHONPATH": python_path(variables.get("PYTHONPATH"))}


def interpreter(name: str | None, cwd: Path, key: str) -> Path | None:
    """Return the interpreter that the spec names. Raises SpecError, which blames `key`, for no program."""
    if name is None:
        return None
    path = (cwd / expanded(name)).absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        hint = "Name an interpreter, such as ~/venvs/mine/bin/python."
        raise SpecError(f"there is no program {path}", key=key, hint=hint)
    return path


def code_of(name: str, cwd: Path, key: str, memory: int) -> Code:
    """Read the file of `path/to/file.py:function`. Raises SpecError, which blames `key`.

    memory: The most bytes that its process may have; 0 for half of the machine's.
    """
    path, _, function = name.rpartition(":")
    file = (cwd / expanded(path)).absolute()
    if not path or not file.is_file() or not function.isidentifier():
        raise SpecError(f"there is no file {file} with a function {function!r}", key=key, hint=_FORM)
    try:
        source = read_file(file, CODE_BYTES)
    except OSError as error:
        raise SpecError(f"{file} cannot be read: {error.strerror}", key=key, hint=_FORM) from error
    return Code(str(file), function, source, memory or read_machine().memory // 2)


def _pass_on(source: IO[bytes], target: int) -> None:
    """Copy what user code prints to its end, and close `source`.

    More than _BURST at once, and then _RATE in a second, is left out; the printer waits for a millisecond.
    """
    room = float(_BURST)
    looked = time.monotonic()
    left_out = 0
    with source:
        while data := os.read(source.fileno(), _PART):
            now = time.monotonic()
            room = min(_BURST, room + _RATE * (now - looked))
            looked = now
            if len(data) > room:
                left_out += len(data)
                time.sleep(_PAUSE_SECONDS)
                continue
            room -= len(data)
            _write(target, left_out, data)
            left_out = 0
    _write(target, left_out)


def _write(target: int, left_out: int, data: bytes = b"") -> None:
    """Write how many bytes were left out, if any, and then `data`."""
    note = f"\n[lorad] {left_out} bytes of what user code printed were left out here\n" if left_out else ""
    with contextlib.suppress(OSError):  # a full disk takes no log, and ends no run for it
        os.write(target, note.encode() + data)
