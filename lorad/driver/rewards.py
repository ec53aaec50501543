"""Scoring samples. User code runs in a child process that can be killed; builtins run here."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec import Struct

from lorad.box.machine import read_machine
from lorad.box.paths import python_path
from lorad.children import guard
from lorad.driver.reward_child import Ready, Reply, Setup
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.rl.reward import BUILTIN, RewardInput, builtin
from lorad.spec.model import RewardSpec

_START_LIMIT = 60.0  # seconds for the import of a reward file
_END_SECONDS = guard.LINGER_SECONDS + guard.KILL_SECONDS + 1.0  # for a guard to end what it started
_PRINTED_SECONDS = 1.0  # for what it printed last to be in the log
_PASSED = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
    ),
    *("LD_LIBRARY_PATH", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME"),
    *("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
    *("LORAD_HOME", "LORAD_ATTEMPT"),  # by which what a run leaves is found
)
_PASSED_PREFIXES = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_")
_Message = TypeVar("_Message", Ready, Reply)
_FORM = "Name it path/to/file.py:function; relative paths start where the spec file is."
_BURST, _RATE = 4 << 20, 256 << 10  # bytes at once, and in a second
_PART = 1 << 16
_PAUSE_SECONDS = 0.001  # between parts that are left out: reading them all must not take a core


class Score(Struct, frozen=True):
    """The reward of one sample; `value` is None and `error` says why when its function failed."""

    value: float | None
    error: str = ""
    seconds: float = 0.0


class Rewarder:
    """The reward of a spec. A context manager: nothing of it is left running after `close`.

    A sample fails alone: by an exception, by a value that is no finite number, by the time limit of its spec,
    by the death of its process; the samples after it are scored as if nothing had been. It is scored again,
    `retries` times at most, when all the others have been.
    """

    def __init__(self, spec: RewardSpec, cwd: Path) -> None:
        """`cwd`: where a relative path starts. Raises SpecError for an unknown builtin, pattern or file."""
        self._timeout, self._retries = spec.timeout, spec.retries
        self._setup = _setup(spec, cwd)
        self.file = Path(self._setup.file) if self._setup.file else None
        self.source = self._setup.source  # what runs, whatever becomes of the file
        self._environment = environment(os.environ, spec.env)
        # `regex` runs in the child: a pattern can take for ever, and does so without letting anything else
        # run.
        self._builtin = builtin(spec.name) if self._setup.name and self._setup.name != "regex" else None
        self._child: _Child | None = None
        self._closed = False
        self._busy = threading.Lock()
        self._broken = ""  # why no child can be started; not tried again for the rest of a call of `score`

    def start(self) -> list[str]:
        """Load the function now; returns the keywords that it requires.

        Raises SpecError when it can not be loaded.
        """
        if self._builtin is not None:
            return []
        self._stop()
        self._child = _Child(self._environment)
        if self._closed:  # by another thread, which may not have seen the child
            self._child.signal()
        try:
            ready = self._child.ask(self._setup, Ready, _START_LIMIT)
        except _Lost as lost:
            self._stop()
            raise SpecError(
                f"{lost} while {self._setup.file} was imported", key="reward", hint="Mend the file."
            ) from None
        if ready.error:
            self._stop()
            raise SpecError(
                f"{ready.error}",
                key="reward",
                hint=ready.hint or "Mend the file; it is imported as a module.",
            )
        return ready.required

    def score(self, samples: Sequence[RewardInput]) -> list[Score]:
        """One Score for each sample, in order. Blocks; never raises for what user code does."""
        if self._builtin is not None:
            return [Score(self._builtin(sample)) for sample in samples]
        with HEART.waits(), self._busy:  # for a child, each time for no longer than its time limit
            self._broken = ""
            scores = [self._score(sample) for sample in samples]
            for _ in range(self._retries):
                again = {i: samples[i] for i, score in enumerate(scores) if score.value is None}
                for i, sample in again.items():
                    scores[i] = self._score(sample)
            return scores

    def close(self) -> None:
        """Kill the child, also under a `score` in another thread, whose remaining samples then fail."""
        self._closed = True
        if (child := self._child) is not None:
            child.signal()
        with self._busy:
            self._stop()

    def __enter__(self) -> "Rewarder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _score(self, sample: RewardInput) -> Score:
        if self._closed or self._broken:
            return Score(None, self._broken or "the rewarder is closed")
        started = time.monotonic()
        try:
            if self._child is None or not self._child.alive:
                self.start()
            assert self._child is not None
            reply = self._child.ask(sample, Reply, self._timeout)
            return Score(reply.value, reply.error, reply.seconds)
        except (SpecError, _Lost) as error:
            self._stop()
            self._broken = str(error) if isinstance(error, SpecError) else ""
            return Score(None, str(error), time.monotonic() - started)

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


class _Lost(Exception):
    """The child did not answer."""


class _Child:
    """A process under a guard, which ends whatever user code started: with it, and with this process at the
    latest. See `lorad/driver/reward_child.py` and `lorad/children/guard.py`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        watched, self._lifeline = os.pipe()
        self._socket, theirs = socket.socketpair()
        with theirs:
            guarded = [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), "--"]
            try:
                self._process = subprocess.Popen(
                    [*guarded, sys.executable, "-P", "-m", "lorad.driver.reward_child", str(watched)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=[watched, theirs.fileno()],
                    process_group=0,
                    env=environment,
                )
            finally:
                os.close(watched)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        assert self._process.stderr is not None
        self._printed = _start_passing_on(self._process.stderr)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: Struct, answer: type[_Message], seconds: float) -> _Message:
        """Send one line and wait for one. Raises _Lost when there is none within `seconds`."""
        line = self._exchange(memoryview(msgspec.json.encode(message, enc_hook=str) + b"\n"), seconds)
        try:
            found = msgspec.json.decode(line, type=answer)
        except msgspec.MsgspecError:
            raise _Lost("the reward process answered out of turn") from None
        if found.is_last:
            self._end()
        return found

    def signal(self) -> None:
        """SIGKILL it and, a moment later, all that user code started."""
        self._process.send_signal(guard.KILL_NOW)

    def kill(self) -> None:
        self._end()
        self._printed.join(_PRINTED_SECONDS)
        for pipe in (self._in, self._out, self._socket):
            pipe.close()
        os.close(self._lifeline)

    def _end(self) -> None:
        self.signal()
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:  # the guard itself is stopped, or waits for what cannot be killed
            self._process.kill()
            self._process.wait()

    def _exchange(self, unsent: memoryview, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        received = b""
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            readable, writable, _ = select.select([self._out], [self._in] if unsent else [], [], max(left, 0))
            if not readable and not writable:
                raise _Lost(f"no result within {seconds:g} s")
            if writable:
                unsent = unsent[self._write(unsent) :]
            if readable:
                chunk = os.read(self._out.fileno(), 1 << 16)
                if not chunk:
                    raise _Lost(self._death())
                received += chunk
        return received

    def _write(self, unsent: memoryview) -> int:
        try:
            return os.write(self._in.fileno(), unsent)
        except BrokenPipeError:
            raise _Lost(self._death()) from None

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_SECONDS)
        code = self._process.poll()
        if code is not None and code - 128 in {number.value for number in signal.Signals}:
            return f"the reward process died of {signal.Signals(code - 128).name}"
        return f"the reward process exited with {code}"


def environment(given: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Select the variables that user code gets: what programs need to work, and what the spec names.

    No secrets.
    """
    found = {
        name: value
        for name, value in given.items()
        if name in _PASSED
        or name in named
        or name.startswith(_PASSED_PREFIXES)
        or name.lower().endswith("_proxy")
    }
    return {**found, "PYTHONPATH": python_path(given.get("PYTHONPATH"))}


def _setup(spec: RewardSpec, cwd: Path) -> Setup:
    path, colon, function = spec.name.rpartition(":")
    memory = spec.memory_bytes or read_machine().memory // 2
    if not colon or spec.name in BUILTIN:
        builtin(spec.name, spec.pattern)
        return Setup(name=spec.name, pattern=spec.pattern, memory=memory)
    file = (cwd / Path(path).expanduser()).absolute()
    if not file.is_file() or not function.isidentifier():
        raise SpecError(f"there is no file {file} with a function {function!r}", key="reward", hint=_FORM)
    try:
        source = file.read_bytes()
    except OSError as error:
        raise SpecError(f"{file} cannot be read: {error.strerror}", key="reward", hint=_FORM) from error
    return Setup(file=str(file), function=function, source=source, memory=memory)


def _start_passing_on(source: IO[bytes], target: int = 2) -> threading.Thread:
    """A thread that ends with `source`, which it closes. Who prints waits for a millisecond at most."""
    thread = threading.Thread(target=_pass_on, args=(source, target), name="printed", daemon=True)
    thread.start()
    return thread


def _pass_on(source: IO[bytes], target: int) -> None:
    room, looked, left_out = float(_BURST), time.monotonic(), 0
    with source:
        while data := os.read(source.fileno(), _PART):
            now = time.monotonic()
            room, looked = min(_BURST, room + _RATE * (now - looked)), now
            if len(data) > room:
                left_out += len(data)
                time.sleep(_PAUSE_SECONDS)
                continue
            room -= len(data)
            left_out = _say(target, left_out)
            _write(target, data)
    _say(target, left_out)


def _say(target: int, left_out: int) -> int:
    """Write how many bytes were left out, if any; return 0, the new count."""
    if left_out:
        _write(target, f"\n[lorad] {left_out} bytes of what user code printed were left out here\n".encode())
    return 0


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk takes no log, and ends no run for it
        os.write(target, data)
