"""Kill -9 of everything, at random instants: every run must end with the digests of an undisturbed one.

    python tests/kill9.py --rounds 100 [--seed 0]

Each round starts the same run (dropout, cosine schedule, two updates per step) in a fresh home, kills driver, pool or
daemon (or several) at a seeded instant, resumes until the run is complete, and compares losses, batch ids, evaluations
and the final digest with those of a run that nobody disturbed. Prints its table; exits 1 on the first difference.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorad.cli.launch import connected
from lorad.client import Client
from lorad.errors import Conflict, DaemonUnreachable, LoradError

SPEC = """
name: victim
seed: 7
lora: {rank: 8, alpha: 16, dropout: 0.1}
algorithm: {group_size: 4, minibatches: 2}
data: {train: sort, prompts_per_step: 6}
trainer: {lr: 2.0e-3, steps: 12, schedule: cosine, warmup_steps: 2}
rollout: {max_new_tokens: 12}
eval: {every: 4, problems: 16}
checkpoint: {every: 3, keep: 2}
"""
STEPS = 12
DEADLINE = 240.0  # seconds for one round
VICTIMS = (("driver",), ("pool",), ("daemon",), ("driver", "pool"), ("driver", "pool", "daemon"))


@dataclass
class World:
    """One fresh home and its daemon."""

    root: Path
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        os.environ["LORAD_HOME"] = str(self.root)
        self.client = connected()

    def start(self) -> None:
        self.client.run(SPEC, source="kill9", cwd=str(self.root), overrides=[], name=None)

    def pids(self) -> dict[str, int]:
        """Who could be killed right now."""
        found = {"daemon": self.client.status()["pid"]}
        for process in self.client.show("victim")["processes"]:
            found[process["role"]] = process["pid"]
        return found

    def close(self) -> None:
        for pid in everybody(self.root):
            kill(pid)
        shutil.rmtree(self.root, ignore_errors=True)


def everybody(root: Path) -> list[int]:
    """Processes whose environment or command line names this home."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(root) in text:
                found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def facts(client: Client) -> dict[str, Any]:
    """What has to be equal: every step's batch and figures, every evaluation, the final digest."""
    figures = ("reward", "loss", "entropy", "grad_norm", "lr", "kl", "logprob_difference")
    steps = client.steps("victim")
    samples = {
        s["step"]: [(r["prompt_id"], r["completion"]) for r in client.samples("victim", step=s["step"])] for s in steps
    }
    return {
        "steps": [(s["step"], *(s["metrics"][f] for f in figures)) for s in steps],
        "samples": samples,
        "evals": [(e["step"], e["score"]) for e in client.evals("victim")],
        "digest": client.adapters("victim")[-1]["sha256"],
    }


def batch(client: Client, step: int) -> list[tuple[str, str]]:
    """The prompts of a step, and what was sampled."""
    return [(sample["prompt_id"], sample["completion"]) for sample in client.samples("victim", step=step)]


def undisturbed() -> tuple[dict[str, Any], float]:
    with_home = World(fresh_home())
    try:
        started = time.monotonic()
        with_home.start()
        finish(with_home.client, resume=False)
        return facts(with_home.client), time.monotonic() - started
    finally:
        with_home.close()


def fresh_home() -> Path:
    return Path(tempfile.mkdtemp(prefix="lorad-kill9-"))


def finish(client: Client, *, resume: bool = True) -> int:
    """Wait for the run to complete, resuming it whenever it is over before its time; how often it was resumed."""
    resumed, deadline = 0, time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            run = client.show("victim")
            if run["state"] == "ended" and run["reason"] == "completed":
                return resumed
            if run["state"] in ("ended", "paused"):
                if not resume:
                    raise SystemExit(f"the run ended without being disturbed: {run['reason']} {run['detail']}")
                client.resume("victim")
                resumed += 1
        except DaemonUnreachable:
            connected()
        except Conflict:
            pass
        time.sleep(0.05)
    raise SystemExit(f"the run was not complete after {DEADLINE:.0f} s: {client.show('victim')}")


def disturbed(chance: random.Random, usual: float) -> tuple[dict[str, Any], str]:
    """One round: kill one to three times, at instants spread over the life of an attempt."""
    world = World(fresh_home())
    try:
        world.start()
        told = []
        for _ in range(chance.randint(1, 3)):
            wait_for_driver(world)
            time.sleep(chance.uniform(0.0, usual))
            told.append(strike(world, chance.choice(VICTIMS)))
            if chance.random() < 0.7:
                revive(world)
        resumed = finish(world.client)
        return facts(world.client), f"killed {'; '.join(told)}; resumed {resumed}x"
    finally:
        world.close()


def wait_for_driver(world: World, patience: float = 20.0) -> None:
    """Until the run has a driver, or is over, or does not get one."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(LoradError):
            run = connected().show("victim")
            if run["state"] in ("ended", "paused") or any(p["role"] == "driver" for p in run["processes"]):
                return
        time.sleep(0.02)


def strike(world: World, victims: tuple[str, ...]) -> str:
    """Kill those of `victims` that live; who it was, and at which step."""
    try:
        pids, step = world.pids(), world.client.show("victim")["step"]
    except LoradError:
        connected()
        return "nobody (the daemon was gone)"
    found = [victim for victim in victims if victim in pids]
    for victim in found:
        kill(pids[victim])
    return f"{'+'.join(found) or 'nobody'} at step {step}"


def revive(world: World) -> None:
    """Resume at once, as a hurried user would."""
    with contextlib.suppress(LoradError):
        connected().resume("victim")


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
        print(
            f"round {number + 1:>3}/{options.rounds}  {'DIFFERS: ' + ', '.join(wrong) if wrong else 'same'}  {told}",
            flush=True,
        )
        if wrong:
            for key in wrong:
                print(f"expected {key}: {expected[key]}\n     got {key}: {got[key]}")
            return 1
    print(f"{options.rounds} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
