"""A run that a test drives, in this process or in one that it kills, in a real pool."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lorad.box.paths import RunDir
from lorad.driver.__main__ import attempt, open_session
from lorad.driver.attempt.main import StopFlag
from lorad.driver.begin import begin
from lorad.driver.session import Session
from lorad.protocol.driver_params import DriverParams, write_params
from lorad.protocol.journal import EndFact, JournalWriter, Record, lineage, read
from lorad.spec.model import to_json
from lorad.spec.text import load_spec
from tests.kit.pool_kit import Running, until
from tests.kit.warm.processes import started

SPEC = """
seed: 3
lora: {rank: 8, alpha: 16, dropout: 0.1}
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 2.0e-3, steps: 7, schedule: cosine, schedule_steps: 20, warmup_steps: 2}
rollout: {max_new_tokens: 8}
eval: {every: 4, problems: 4}
checkpoint: {every: 3, keep: 2}
"""
FIGURES = ("reward", "loss", "entropy", "grad_norm", "lr", "logprob_difference", "staleness", "updates")


def start_driver(attempt: Path, cwd: Path) -> subprocess.Popen[bytes]:
    """Start a driver of its own process, which says nothing but its errors."""
    with open(os.devnull, "r+b") as nothing:
        fds = [nothing.fileno(), nothing.fileno(), 2]
        return started(["-m", "lorad.driver", str(attempt)], os.environ, cwd, fds, detached=False)


class Driven:
    """A run of this test's own in the pool, whose attempts are driven here or in a process."""

    def __init__(self, running: Running, home: Path, name: str, *overrides: str) -> None:
        self.running, self.run = running, RunDir(home / name)
        self.run.root.mkdir()
        spec = load_spec(SPEC, overrides=overrides)
        self.run.spec.write_bytes(to_json(spec))
        self.params = DriverParams(
            run=name, run_dir=str(self.run.root), attempt=0, steps=spec.trainer.steps,
            pool="p", pool_socket=running.config.socket, cwd=str(home),
        )  # fmt: skip

    def next(self, **changes: Any) -> DriverParams:
        self.params = msgspec.structs.replace(self.params, attempt=self.params.attempt + 1, **changes)
        self.run.attempt(self.params.attempt).root.mkdir(parents=True)
        return self.params

    def drive(self, stop: StopFlag | None = None, **changes: Any) -> EndFact:
        params = self.next(**changes)
        with JournalWriter(self.run.journal, params.run, params.attempt) as journal:
            end, step = attempt(params, self.run, journal, stop or StopFlag())
            journal.append("end", step, end)
        return end

    def struck(self, step: int, blow: signal.Signals) -> int:
        """Run another attempt in a process that gets a signal once its journal has `step`; returns its exit
        code.
        """
        directory = self.run.attempt(self.next().attempt).root
        write_params(directory, self.params)
        child = start_driver(directory, Path.cwd())
        until(lambda: any(r.step >= step for r in self.facts("step")) or child.poll() is not None)
        child.send_signal(blow)
        return child.wait()

    @contextlib.contextmanager
    def begun(self) -> Iterator[Session]:
        """Begin an attempt that a test can continue."""
        params = self.next()
        with (
            JournalWriter(self.run.journal, params.run, params.attempt) as journal,
            contextlib.ExitStack() as stack,
        ):
            session = open_session(params, self.run, journal, StopFlag(), stack)
            assert session is not None
            begin(session)
            if session.ahead is not None:
                stack.push(session.ahead)
            yield session

    def set(self, *overrides: str) -> None:
        self.run.spec.write_bytes(to_json(load_spec(self.run.spec.read_text(), overrides=overrides)))

    def facts(self, kind: str) -> list[Record]:
        return [r for r in lineage([r for r, _ in read(self.run.journal)]) if r.kind == kind]

    def outcome(self) -> dict[str, Any]:
        """What must not depend on kills and resumes."""
        steps = self.facts("step")
        lines = [(self.run.root / r.data["samples"]).read_text().splitlines() for r in steps]
        made = [[msgspec.json.decode(line) for line in step] for step in lines]
        return {
            "steps": [
                (r.step, r.data["position"], *(r.data["metrics"].get(f) for f in FIGURES)) for r in steps
            ],
            "samples": [
                [(s["prompt_id"], s["completion"], s["logprobs"], s["reward"]) for s in step] for step in made
            ],
            "evals": [(r.step, r.data["score"]) for r in self.facts("eval")],
            "digest": self.facts("version")[-1].data["sha256"],
        }
