"""Kill -9 under many runs: every batch counts once, every token is of an attested version, each run ends as
if alone.

    python -m faults.kill9_many [--runs 8] [--rounds 3] [--steps 12] [--seed 0]

Runs that differ in rank, seed, task, group size and algorithm train in one pool. When all are mid-run, each
round kills something else: the pool, daemon and pool, a driver. All resume (restart: on-failure). Then, from
the journals and the sample files alone, the audit of each run (lorad/daemon/record/audit.py) must find
nothing, and batches, samples, figures and digests must be those of each run alone and undisturbed. Exits 1 on
the first difference.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lorad.daemon.record.audit import audit
from lorad.errors import Conflict, DaemonUnreachable
from lorad.records.runs import RunDetails
from tests.kit.warm.starting import warm_process
from tests.kit.world import World, world

SPEC = """
seed: {seed}
lora: {{rank: {rank}, alpha: 16, dropout: {dropout}, target_modules: "{targets}"}}
algorithm: {{group_size: {group}, minibatches: {minibatches}}}
data: {{train: {task}, prompts_per_step: {prompts}}}
trainer: {{lr: 2.0e-3, steps: {steps}, schedule: cosine}}
rollout: {{max_new_tokens: 12}}
eval: {{every: 0}}
checkpoint: {{every: {saved}}}
resources: {{restart: on-failure}}
"""
ROUNDS = (("pool",), ("daemon", "pool"), ("driver",))
DEADLINE = 600.0  # seconds for one round
KILL_AFTER = 2  # steps of every run


class Many:
    """`count` runs that share a home; `facts` are those of each."""

    def __init__(self, made: World, count: int, steps: int, prefix: str = "run") -> None:
        self.made, self.steps = made, steps
        self.names = [f"{prefix}-{number}" for number in range(count)]

    def spec(self, number: int) -> Path:
        text = SPEC.format(
            seed=number,
            rank=(4, 8, 16, 32)[number % 4],
            dropout=0.1 if number // 4 % 2 and number % 3 < 2 else 0.0,
            targets=("all-linear", "q_proj,v_proj", "all-linear")[number % 3],
            group=(4, 2)[number % 2],
            minibatches=(1, 1, 2)[number % 3],
            task=("sort", "reverse")[number % 2],
            prompts=(4, 6, 3)[number % 3],
            steps=self.steps,
            saved=max(1, self.steps // 3),
        )
        return self.made.spec(text, f"{self.names[number]}.yaml")

    def start(self, number: int, *how: str) -> None:
        self.made.lorad("run", self.spec(number), "--name", self.names[number], *how)

    def alone(self) -> list[dict[str, Any]]:
        """The facts of each, one after another and undisturbed."""
        for number in range(len(self.names)):
            self.start(number, "--wait")
        return [self.made.facts(name) for name in self.names]

    def together(self, victims: tuple[str, ...], chance: random.Random) -> str:
        """Start all, strike when all are mid-run, look after them until all are complete; what was done."""
        self.start(0, "--detach")
        pool = self.made.pid(self.names[0], "pool")
        os.kill(pool, signal.SIGSTOP)  # so that all begin at once, however slow this machine is
        for number in range(1, len(self.names)):
            self.start(number, "--detach")
        os.kill(pool, signal.SIGCONT)
        self.made.until(
            lambda: all(run.step >= KILL_AFTER for run in self.shown()), "all are mid-run", DEADLINE, 0.1
        )
        told = self.strike(victims, chance)
        self.finish()
        return told

    def shown(self) -> list[RunDetails]:
        return [self.made.client.show(name) for name in self.names]

    def strike(self, victims: tuple[str, ...], chance: random.Random) -> str:
        """Kill -9; who it was, at which steps."""
        shown = self.shown()
        alive = [run for run in shown if run.state == "running"]
        pids = {"daemon": self.made.client.status().pid}
        pids |= {process.role: process.pid or 0 for process in chance.choice(alive).processes}
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        pools = len({run.pool for run in alive})
        return (
            f"{'+'.join(victims)} under {len(alive)} runs in {pools} pool, at steps {[r.step for r in shown]}"
        )

    def finish(self) -> None:
        """Until all are complete; what is over before its time is resumed."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            try:
                left = [run for run in self.shown() if run.reason != "completed"]
                for run in left:
                    if run.state in ("ended", "paused"):
                        with contextlib.suppress(Conflict):
                            self.made.client.resume(run.name)
            except DaemonUnreachable:
                self.made.lorad("daemon", "start")
                continue
            if not left:
                return
            time.sleep(0.1)
        raise SystemExit(f"not complete after {DEADLINE:.0f} s: {self.shown()}")

    def exceptions(self, expected: list[dict[str, Any]]) -> list[str]:
        """What the audits find, and what is not as it was alone."""
        found = []
        for name, alone in zip(self.names, expected, strict=True):
            found += [f"{name}: {wrong}" for wrong in audit(Path(self.made.client.show(name).directory))]
            got = self.made.facts(name)
            found += [f"{name}: {key} differ from alone" for key in alone if got[key] != alone[key]]
        return found

    def counted(self) -> str:
        shown = self.shown()
        batches = sum(len(self.made.client.steps(name)) for name in self.names)
        tokens = sum(
            step.metrics["tokens"] or 0 for name in self.names for step in self.made.client.steps(name)
        )
        attempts = sum(len(run.attempts) for run in shown)
        return f"{len(shown)} runs complete in {attempts} attempts, {batches} batches, {tokens:.0f} tokens"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=len(ROUNDS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with warm_process():
        return play(options)


def play(options: argparse.Namespace) -> int:
    """Play the rounds; returns the exit code."""
    begun = time.monotonic()
    with world() as made:
        expected = Many(made, options.runs, options.steps).alone()
    print(f"{options.runs} runs one after another, undisturbed: {time.monotonic() - begun:.1f} s", flush=True)
    for number in range(options.rounds):
        begun = time.monotonic()
        with world() as made:
            many = Many(made, options.runs, options.steps)
            struck = many.together(ROUNDS[number % len(ROUNDS)], random.Random(f"{options.seed}/{number}"))
            print(f"round {number + 1}/{options.rounds}: killed {struck}", flush=True)
            found = many.exceptions(expected)
            seconds = time.monotonic() - begun
            print(f"  {many.counted()}: {len(found)} exceptions ({seconds:.1f} s)", flush=True)
        if found:
            print("\n".join(f"  {wrong}" for wrong in found))
            return 1
    print("every batch once, every token of an attested version, every run as if alone: 0 exceptions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
