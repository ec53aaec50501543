"""The stages of the day, in their order, and how one is run: a process with a time limit, of which nothing is
left afterwards.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_day.stage import read_figures
from tests.kit.leftovers import kill_leftovers
from tests.kit.world import REPOSITORY

State = Literal["waiting", "running", "passed", "failed", "over its time", "no time left"]
_ERROR_LINES = 15
_LEAST_SECONDS = 1.0  # with less, a stage is not begun
_PYTEST = re.compile(r"PYTEST_")  # variables of a pytest that this runs in


@dataclass(frozen=True)
class Stage:
    """seconds: its limit. arguments: of the interpreter, before the options of `stage.play`."""

    name: str
    seconds: float
    about: str
    arguments: tuple[str, ...]


def _stage(module: str, seconds: float, about: str) -> Stage:
    return Stage(module.rpartition(".")[2], seconds, about, ("-m", module))


STAGES: Sequence[Stage] = (
    _stage("benchmarks.gpu_day.facts", 10, "the device, its driver, its limits"),
    _stage("benchmarks.gpu_day.model", 40, "random models written"),
    _stage("benchmarks.gpu_day.parity", 75, "conformance suites on the device"),
    _stage("benchmarks.gpu_day.run", 130, "GRPO in the fused pool, killed and resumed"),
    _stage(
        "benchmarks.gpu_day.rollout",
        105,
        "sampling: shared prompts, four adapters in a batch",
    ),
    _stage("benchmarks.gpu_day.train", 75, "gradients: ragged samples, no memory left"),
    _stage("benchmarks.gpu_day.publish", 25, "an optimizer step until the engine serves it"),
    _stage("benchmarks.gpu_day.experts", 45, "mixtures of experts"),
    _stage("benchmarks.gpu_day.fsdp", 75, "the FSDP trainer; its base leaves and returns"),
)


@dataclass
class Outcome:
    """What became of a stage. error: the last lines that it printed, unless it passed."""

    stage: Stage
    state: State = "waiting"
    seconds: float = 0.0
    error: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        return self.state not in ("waiting", "running", "passed")


def run_stage(outcome: Outcome, options: Sequence[str], logs: Path, left: float) -> None:
    """Run a stage for at most its own limit and the seconds that are left of the day.

    Whatever it started, daemons and pools too, is killed at its end.
    """
    stage, limit = outcome.stage, min(outcome.stage.seconds, left)
    if limit < min(_LEAST_SECONDS, stage.seconds):
        outcome.state = "no time left"
        outcome.error = "the stages before it took all of the time"
        return
    scratch = Path(tempfile.mkdtemp(prefix="gd-"))
    log, figures, began = logs / f"{stage.name}.log", scratch / "figures", time.monotonic()
    try:
        command = [sys.executable, *stage.arguments, *options, "--figures", str(figures)]
        code = _ended(command, log, limit, _environment(scratch))
        outcome.state = "over its time" if code is None else "failed" if code else "passed"
        outcome.figures = read_figures(figures)
    finally:
        kill_leftovers(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
    outcome.seconds = time.monotonic() - began
    if outcome.has_failed:
        found = f"it was killed after {limit:g} s\n" if code is None else f"it exited with {code}\n"
        outcome.error = found + _last_lines(log)


def _ended(command: list[str], log: Path, limit: float, env: dict[str, str]) -> int | None:
    """Wait for a process; returns its exit code, or None where it took too long and was killed."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=env, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(scratch: Path) -> dict[str, str]:
    """Make the variables of a stage: what it writes is in `scratch`, and nothing asks a network."""
    kept = {name: value for name, value in os.environ.items() if not _PYTEST.match(name)}
    return kept | {
        "LORAD_HOME": str(scratch),
        "TMPDIR": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_ERROR_LINES:])
