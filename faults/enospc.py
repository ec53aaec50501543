"""make enospc: the disk of a home fills up under a run, at different moments.

Training continues or stops with its reason; the daemon answers, and says why it cannot write; the database is
whole. With space again the run is resumed, and ends with the same bytes as undisturbed. Needs root, for a
small tmpfs.

    python -m faults.enospc --rounds 8 --seed 0
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lorad.errors import Conflict, DaemonUnreachable, LoradError
from lorad.store.check import check
from tests.kit.leftovers import kill_leftovers
from tests.kit.warm.starting import warm_process
from tests.kit.world import World, world

STEPS = 6
SPEC = f"""
algorithm: {{group_size: 2}}
data: {{train: sort, prompts_per_step: 2}}
trainer: {{lr: 2.0e-3, steps: {STEPS}}}
rollout: {{max_new_tokens: 8}}
eval: {{every: 0}}
checkpoint: {{every: 2}}
resources: {{restart: never}}
"""
MOMENTS = ("training", "checkpoint", "publish", "daemon")
SIZE = "48m"
DEADLINE = 90.0


class NoMount(Exception):
    """A small filesystem cannot be mounted here."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with warm_process():
        return play(options)


def play(options: argparse.Namespace) -> int:
    """Play the rounds; returns the exit code."""
    expected = undisturbed()
    print(f"undisturbed: {STEPS} steps, digest {expected['digest'][:12]}", flush=True)
    for number in range(options.rounds):
        chance, moment = random.Random(f"{options.seed}/{number}"), MOMENTS[number % len(MOMENTS)]
        try:
            told, wrong = filled(moment, chance, expected)
        except NoMount as error:
            print(f"skipped: {error}")
            return 0
        print(
            f"round {number + 1:>3}/{options.rounds}  full at {moment:<10}  {wrong or 'same'}  {told}",
            flush=True,
        )
        if wrong:
            return 1
    print(f"{options.rounds} passed, 0 failed")
    return 0


def undisturbed() -> dict[str, Any]:
    with world() as made:
        made.run("victim", text=SPEC)
        return made.facts("victim")


@contextlib.contextmanager
def small_world() -> Iterator[World]:
    """A home on a filesystem of its own. Raises NoMount."""
    made = World()
    made.home.root.mkdir(mode=0o700)
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "lorad", str(made.home.root)]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode:
            raise NoMount(done.stderr.strip())
        try:
            yield made
        finally:
            kill_leftovers(made.home.root)
            subprocess.run(["umount", "-l", str(made.home.root)], check=True)
    finally:
        made.close()


def filled(moment: str, chance: random.Random, expected: dict[str, Any]) -> tuple[str, str]:
    """One round: what was seen while the disk was full, and what is wrong, "" when nothing is."""
    with small_world() as made:
        made.lorad("run", made.spec(SPEC), "--name", "victim", "--detach")
        await_moment(made, moment, chance)
        filler = fill(made.home.root, leave=chance.choice((0, 0, 4096, 20_000)))
        told = look(made)
        filler.unlink()
        finish(made)
        facts = made.facts("victim")
        wrong = [key for key in expected if facts[key] != expected[key]]
        problems = check(made.home.database).problems
        return told, "; ".join([*(f"{key} DIFFERS" for key in wrong), *problems])


def await_moment(made: World, moment: str, chance: random.Random) -> None:
    directory = made.home.run("victim")
    made.reached("victim", chance.randint(1, 3))
    if moment in ("checkpoint", "publish"):
        parent = directory.checkpoints if moment == "checkpoint" else directory.versions
        before = set(parent.glob("*")) if parent.exists() else set()
        made.until(lambda: (set(parent.glob("*")) if parent.exists() else set()) - before, f"a new {moment}")


def fill(root: Path, *, leave: int) -> Path:
    """A file that takes what is free, but for some bytes."""
    path = root / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while os.statvfs(root).f_bavail * 4096 >= leave + size:
                    file.write(b"\1" * size)
    return path


def look(made: World) -> str:
    """Wait until the run ends with a reason or continues; reads are answered, a write is refused and changes
    nothing.
    """
    deadline, refused = time.monotonic() + 20.0, ""
    while time.monotonic() < deadline:
        run = made.client.show("victim")
        assert made.client.list(all=True) and made.client.status().pid
        refused = refused or refusal(made)
        if run.state == "ended" or (refused and time.monotonic() > deadline - 16.0):
            break
        time.sleep(0.05)
    how = f"{run.reason}: {run.detail.splitlines()[0][:70]}" if run.state == "ended" else f"still {run.state}"
    return f"step {run.step}, {how}; a write: {refused or 'went through'}"


def refusal(made: World) -> str:
    """Ask for something that has to be written; returns the refusal."""
    try:
        (made.client.unpin if made.client.adapters("victim")[0].pinned else made.client.pin)("victim@1")
    except DaemonUnreachable:
        raise
    except Conflict:
        return ""  # its files are gone or on their way
    except LoradError as error:
        assert "space" in error.message or "full" in error.message, error.message
        return f"{error.message[:60]}"
    return ""


def finish(made: World) -> None:
    """Until the run is complete; it is resumed whenever it is over before its time."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        run = made.client.show("victim")
        if run.reason == "completed":
            return
        if run.state == "ended":
            made.lorad("resume", "victim", "--detach")
        time.sleep(0.05)
    raise SystemExit(f"the run was not complete after {DEADLINE:.0f} s: {made.client.show('victim')}")


if __name__ == "__main__":
    sys.exit(main())
