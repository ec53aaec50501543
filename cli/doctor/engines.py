"""Checks of `lorad doctor --engine` and `--trainer`, in a process of their own: commands load no torch."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import msgspec

from lorad.box.paths import Home
from lorad.children.interpreter import InterpreterFinding
from lorad.cli.output import note

_STOP_SECONDS = 30.0  # for a probe that is interrupted to stop the server that it started


class _ProbeLine(msgspec.Struct):
    """A line of the probe: a finding, or a note on what takes time."""

    check: InterpreterFinding | None = None
    note: str = ""


def engine_checks(home: Home, kind: str, *, start: bool) -> Iterator[InterpreterFinding]:
    """Check a server. Each finding comes as soon as it is known."""
    return probed(home, ["lorad.backends.engine_probe", kind, *([] if start else ["--no-start"])])


def trainer_checks(home: Home, kind: str) -> Iterator[InterpreterFinding]:
    """Check a trainer like `engine_checks` does a server; nothing is started."""
    return probed(home, ["lorad.backends.trainer_probe", kind])


def probed(home: Home, module: Sequence[str]) -> Iterator[InterpreterFinding]:
    """Run a module that prints findings, with its arguments; its notes go to the person at once."""
    command = [sys.executable, "-m", *module]
    environment = os.environ | {"LORAD_HOME": str(home.root), "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # in a session of its own: Ctrl-C reaches it once, from here
            command, stdout=subprocess.PIPE, stderr=errors, cwd="/", env=environment, start_new_session=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for text in process.stdout:
                line = msgspec.json.decode(text, type=_ProbeLine)
                if line.check is not None:
                    yield line.check
                else:
                    note(f"      {line.note}")
            process.wait()
        finally:  # it ends with everything that it started, the server included
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        if process.returncode:
            errors.seek(0)
            tail = errors.read().decode(errors="replace").strip().splitlines()
            detail = f"the probe exited with {process.returncode}: {tail[-1] if tail else 'it said nothing'}"
            yield InterpreterFinding("probe", False, detail, f"To see more: {' '.join(command)}")
