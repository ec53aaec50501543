"""Checks of `lorad doctor --engine` and `--trainer`, run in a process of their own because commands load no
torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from lorad.box.paths import Home
from lorad.cli.output import note

STOP_SECONDS = 30.0  # for a probe that is interrupted to stop the server that it started


def engine_checks(home: Home, kind: str, *, start: bool) -> Iterator[dict[str, Any]]:
    """Check a server; each result {name, ok, detail, hint, facts} comes as soon as it is known."""
    return probed(home, ["lorad.backends.engine_probe", kind, *([] if start else ["--no-start"])])


def trainer_checks(home: Home, kind: str) -> Iterator[dict[str, Any]]:
    """Check a trainer like `engine_checks` does a server; nothing is started."""
    return probed(home, ["lorad.backends.trainer_probe", kind])


def probed(home: Home, module: Sequence[str]) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", *module]
    environment = os.environ | {"LORAD_HOME": str(home.root), "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # in a session of its own: Ctrl-C reaches it once, through `stop`
            command, stdout=subprocess.PIPE, stderr=errors, cwd="/", env=environment, start_new_session=True
        ) as process,
    ):
        try:
            yield from lines(process)
            process.wait()
        finally:
            stop(process)
        if process.returncode:
            errors.seek(0)
            tail = errors.read().decode(errors="replace").strip().splitlines()
            detail = f"the probe exited with {process.returncode}: {tail[-1] if tail else 'it said nothing'}"
            yield {
                "name": "probe",
                "ok": False,
                "detail": detail,
                "hint": f"To see more: {' '.join(command)}",
            }


def lines(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Its checks; its notes go to the person at once."""
    assert process.stdout is not None
    for line in process.stdout:
        told = json.loads(line)
        if "check" in told:
            yield told["check"]
        else:
            note(f"      {told['note']}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the probe with everything it started, the server included."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
