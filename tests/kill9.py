"""Kill -9 of everything, at random instants: every run must end with the digests of an undisturbed one.

    python -m tests.kill9 --rounds 100 [--seed 0]

Each round starts the same run (dropout, cosine schedule, two updates per step) in a fresh home, kills driver, pool or
daemon (or several) at seeded instants, resumes until the run is complete, and compares losses, batch ids, samples,
evaluations and the final digest with those of a run that nobody disturbed. Exits 1 on the first difference.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from typing import Any

from lorad.errors import Conflict, DaemonUnreachable, LoradError
from tests.world import World, world

SPEC = """
name: victim
seed: 7
lora: {rank: 8, alpha: 16, dropout: 0.1}
algorithm: {group_size: 4, minibatches: 2}
data: {train: sort, prompts_per_step: 6}
trainer: {lr: 2.0e-3, steps: 40, schedule: cosine, warmup_steps: 2}
rollout: {max_new_tokens: 12}
eval: {every: 8, problems: 16}
checkpoint: {every: 4, keep: 2}
"""
DEADLINE = 240.0  # seconds for one round
VICTIMS = (("driver",), ("pool",), ("daemon",), ("driver", "pool"), ("driver", "pool", "daemon"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    expected, usual = undisturbed()
    print(f"undisturbed: {len(expected['steps'])} steps in {usual:.1f} s, digest {expected['digest'][:12]}", flush=True)
    for number in range(options.rounds):
        got, told = disturbed(random.Random(f"{options.seed}/{number}"), usual)
        wrong = [key for key in expected if got[key] != expected[key]]
        verdict = f"DIFFERS: {', '.join(wrong)}" if wrong else "same"
        print(f"round {number + 1:>3}/{options.rounds}  {verdict}  {told}", flush=True)
        if wrong:
            print("\n".join(f"{key}: expected {expected[key]}\n{key}: got {got[key]}" for key in wrong))
            return 1
    print(f"{options.rounds} passed, 0 failed")
    return 0


def undisturbed() -> tuple[dict[str, Any], float]:
    """The facts, and how many seconds a run takes from its driver's start."""
    with world() as made:
        start(made)
        made.pid("victim", "driver")
        started = time.monotonic()
        over = made.over("victim")
        if over["reason"] != "completed":
            raise SystemExit(f"the run ended without being disturbed: {over['reason']}: {over['detail']}")
        return made.facts("victim"), time.monotonic() - started


def disturbed(chance: random.Random, usual: float) -> tuple[dict[str, Any], str]:
    """One round: kill one to three times, at instants spread over the life of an attempt."""
    with world() as made:
        start(made)
        told = []
        for _ in range(chance.randint(1, 3)):
            wait_for_driver(made)
            time.sleep(chance.uniform(0.0, usual))
            told.append(strike(made, chance.choice(VICTIMS)))
            if chance.random() < 0.7:
                look_after(made, impatient=True)
        finish(made)
        return made.facts("victim"), f"killed {'; '.join(told)}: {len(made.client.show('victim')['attempts'])} attempts"


def start(made: World) -> None:
    made.lorad("run", made.spec(SPEC), "--detach")


def wait_for_driver(made: World, patience: float = 20.0) -> None:
    """Until the run has a driver, or is over, or does not get one."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        run = look_after(made)
        if run and (run["state"] in ("ended", "paused") or any(p["role"] == "driver" for p in run["processes"])):
            return
        time.sleep(0.02)


def strike(made: World, victims: tuple[str, ...]) -> str:
    """Kill those of `victims` that live; who it was, and at which step."""
    try:
        run = made.client.show("victim")
        pids = {"daemon": made.client.status()["pid"]} | {p["role"]: p["pid"] for p in run["processes"]}
    except LoradError:
        return "nobody (the daemon was gone)"
    found = [victim for victim in victims if victim in pids]
    for victim in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
    return f"{'+'.join(found) or 'nobody'} at step {run['step']}"


def look_after(made: World, *, impatient: bool = False) -> dict[str, Any] | None:
    """The run as it is; the daemon is started if need be, and `impatient` resumes whatever can be."""
    try:
        if impatient:
            with contextlib.suppress(Conflict):
                made.client.resume("victim")
        return made.client.show("victim")
    except DaemonUnreachable:
        made.lorad("daemon", "start")
        return None


def finish(made: World) -> None:
    """Until the run is complete, resuming it whenever it is over before its time."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        run = look_after(made)
        if run and run["reason"] == "completed":
            return
        if run and run["state"] in ("ended", "paused"):
            look_after(made, impatient=True)
        time.sleep(0.05)
    raise SystemExit(f"the run was not complete after {DEADLINE:.0f} s: {made.client.show('victim')}")


if __name__ == "__main__":
    sys.exit(main())
