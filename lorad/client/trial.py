"""Samples of a spec that is not queued, made by a process of their own: `lorad try`.

It is started under a guard, so that nothing of it outlives the command. It needs no daemon and reads a
Question from standard input; each line that it writes is a Line.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad.children import guard
from lorad.client.shapes import Sample
from lorad.envs.replay import Difference
from lorad.errors import LoradError, from_wire
from lorad.protocol.preflight import ErrorSaid
from lorad.spec.model import Spec

_PROCESS = "lorad.daemon.beside.trial"
_END_SECONDS = guard.LINGER_SECONDS + guard.KILL_SECONDS + 1.0
_LONGEST = 60  # characters of a directory in which the path of a socket has room


class Question(Struct, frozen=True):
    """What to try.

    Attributes:
        cwd: where relative paths of the spec begin.
        directory: an empty one, for the files of the trial.
        count: samples.
    """

    spec: dict[str, Any]
    cwd: str
    directory: str
    count: int


class Line(Struct, frozen=True, omit_defaults=True):
    """What the process says.

    Attributes:
        progress: what it does now, in words.
        differences: of the episodes when they were played again; None where they cannot be.
        is_over: nothing more follows.
    """

    progress: str = ""
    sample: Sample | None = None
    differences: list[Difference] | None = None
    is_over: bool = False
    error: ErrorSaid | None = None


def attempt(spec: Spec, *, cwd: Path, count: int) -> Iterator[Line]:
    """Yield what the process says, the last line with `is_over`. Raises what it raised."""
    place = None if len(tempfile.gettempdir()) <= _LONGEST else "/tmp"
    with tempfile.TemporaryDirectory(prefix="lorad-try-", dir=place) as directory, _started() as process:
        question = Question(msgspec.to_builtins(spec), str(cwd), directory, count)
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(question))
            process.stdin.close()
        for text in process.stdout:
            line = msgspec.json.decode(text, type=Line)
            if line.error is not None:
                raise from_wire(msgspec.to_builtins(line.error))
            yield line
            if line.is_over:
                return
    raise LoradError("the trial ended before it was over", hint="What it printed last may say why.")


@contextlib.contextmanager
def _started() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends, with all that it started, when this is left or this process is gone."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), "--"]
            process = subprocess.Popen(
                [*command, sys.executable, "-P", "-m", _PROCESS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(guard.KILL_NOW)
                    _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the guard to have killed what it started, whatever keys are pressed meanwhile."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    finally:
        signal.signal(signal.SIGINT, before)
