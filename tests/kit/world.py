"""A home of its own and the `lorad` command in it, as a user would type it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lorad.box.paths import Home, python_path
from lorad.client.client import Client
from lorad.daemon.process.processes import attempts_under, read_status
from lorad.protocol.journal import read
from lorad.protocol.listener import answers
from lorad.records.metrics import metric_of
from lorad.records.runs import RunDetails
from tests.kit.leftovers import kill_leftovers
from tests.kit.warm.processes import CLIENT as WARM

REPOSITORY = Path(__file__).parents[2]
COLD = (sys.executable,)
# Seconds until what a test waits for counts as hung: on a slow machine a server takes ten minutes to start.
PATIENCE = 1800.0

# Small and quick: 4 prompts x 4 samples.
SMALL = """
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 2.0e-3, steps: 6}
rollout: {max_new_tokens: 12}
eval: {every: 0}
checkpoint: {every: 2}
"""


class World:
    """`lorad(...)` runs the command line; everything that it starts dies with the world.

    python: how an interpreter is called. Command, daemon, drivers and pools are forks of the warm process
    where there is one, unless that is `COLD`. place: where its directory is made.
    """

    def __init__(self, python: Sequence[str] = WARM, place: Path | None = None) -> None:
        self.python = python
        self.root = Path(tempfile.mkdtemp(prefix="lr-", dir=place))
        self.home = Home(self.root / "home")
        self.client = Client(self.home)

    def lorad(self, *arguments: object, expect: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """The finished command; its exit code must be `expect`."""
        done = subprocess.run(
            [*self.python, "-m", "lorad", *map(str, arguments)],
            env=self.environment | env,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == expect, (
            f"lorad {arguments} exited {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        return done

    @property
    def environment(self) -> dict[str, str]:
        """What a command of this world has."""
        paths = python_path(str(REPOSITORY), os.environ.get("PYTHONPATH"))
        return os.environ | {"LORAD_HOME": str(self.home.root), "PYTHONPATH": paths}

    def json(self, *arguments: object, expect: int = 0) -> Any:
        """What the command prints on stdout with --json."""
        return json.loads(self.lorad(*arguments, "--json", expect=expect).stdout)

    def spec(self, text: str = SMALL, name: str = "spec.yaml") -> Path:
        path = self.root / name
        path.write_text(text)
        return path

    def run(self, name: str, *overrides: str, text: str = SMALL, expect: int = 0) -> RunDetails:
        """A run that is over: its JSON.

        By the command, which starts the daemon; by the client where one answers.
        """
        spec = self.spec(text, f"{name}.yaml")
        if expect or not answers(self.home.socket):
            answer = self.json("run", spec, *overrides, "--name", name, "--wait", expect=expect)
            return msgspec.convert(answer, RunDetails)
        self.client.run(text, source=str(spec), cwd=str(self.root), overrides=[*overrides], name=name)
        over = self.over(name)
        assert over.reason == "completed", over
        return over

    def until(
        self, true: Callable[[], Any], what: str, seconds: float = PATIENCE, every: float = 0.02
    ) -> Any:
        """Poll until `true()` is; what it gave."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if result := true():
                return result
            time.sleep(every)
        raise AssertionError(f"not within {seconds:.0f} s: {what}\n{self.client.list(all=True)}")

    def reached(self, run: str, step: int) -> Any:
        return self.until(lambda: self.client.show(run).step >= step, f"{run} at step {step}")

    def strike(self, run: str, role: str, step: int, seconds: float = PATIENCE) -> None:
        """Kill the driver or the pool of a run's first attempt as soon as its journal has a step.

        Nothing asks the daemon, which may be so far behind that a short run would be over.
        """
        journal = self.home.run(run).journal
        self.until(lambda: any(r.step >= step for r, _ in read(journal)), f"{run} at step {step}", seconds)
        life = self.home.run(run).attempt(1)
        if role == "pool":
            (pool,) = self.home.pools.iterdir()
            life = [*attempts_under(pool)][-1]
        status = read_status(life)
        assert status is not None
        os.kill(status["pid"], signal.SIGKILL)

    def over(self, run: str, seconds: float = PATIENCE) -> RunDetails:
        def look() -> RunDetails | None:
            shown = self.client.show(run)
            return shown if shown.state in ("ended", "paused") else None

        # each look costs the daemon some milliseconds, and nothing follows an end closely
        found: RunDetails = self.until(look, f"{run} is over", seconds, every=0.1)
        return found

    def completed(self, run: str, seconds: float = PATIENCE) -> RunDetails:
        """Wait for the run's end; one that did not complete fails with its detail and its logs, and one that
        measured what lorad/records/metrics.py does not explain with the names.
        """
        shown = self.over(run, seconds)
        if shown.reason != "completed":
            logs = [path for path in self.home.root.rglob("*.log") if path.stat().st_size]
            ends = [f"== {path}\n{path.read_text(errors='replace')[-4000:]}" for path in logs]
            raise AssertionError("\n".join([f"{run} {shown.reason}: {shown.detail}", *ends]))
        measured = {name for step in self.client.steps(run) for name in step.metrics}
        assert not (unexplained := {name for name in measured if metric_of(name) is None}), unexplained
        return shown

    def pid(self, run: str, role: str) -> int:
        """Wait for a process of the run with this role; returns its pid."""

        def look() -> int | None:
            return next((p.pid for p in self.client.show(run).processes if p.role == role), None)

        pid: int = self.until(look, f"{run} has a {role}")
        return pid

    def facts(self, run: str) -> dict[str, Any]:
        """What must not depend on kills and resumes: batches, figures, evaluations, the final digest."""
        figures = ("reward", "loss", "entropy", "grad_norm", "lr", "kl", "logprob_difference")
        steps = self.client.steps(run)
        return {
            "steps": [(s.step, *(s.metrics.get(figure) for figure in figures)) for s in steps],
            "samples": {s.step: self._batch(run, s.step) for s in steps},
            "evals": [(e.step, e.score) for e in self.client.evals(run)],
            "digest": self.client.adapters(run)[-1].sha256,
        }

    def close(self) -> None:
        kill_leftovers(self.home.root)
        shutil.rmtree(self.root, ignore_errors=True)

    def _batch(self, run: str, step: int) -> list[tuple[str, str]]:
        return [(sample.prompt_id, sample.completion) for sample in self.client.samples(run, step=step)]


@contextmanager
def world(python: Sequence[str] = WARM, place: Path | None = None) -> Iterator[World]:
    made = World(python, place)
    try:
        yield made
    finally:
        made.close()
