"""An upgrade under running jobs, with two versions of the schema; and the way back.

    python -m faults.upgrade [--runs 2]

Runs start under the daemon of today. Then its successor, a lorad with one migration more, takes over: by
SIGTERM, by kill -9, and after it was itself killed at four points of the migration (before and after the
copy, amid it, before its commit). All the while the processes of the runs stay the same and their steps
continue; what was known stays known; a copy of the database from before stands beside. The older daemon
refuses the newer database with commands, which are then typed: it works again, and has everything, too. Exits
1 where one of these does not hold.
"""

import argparse
import contextlib
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from faults.newer_daemon import KILLS, NAME
from lorad.errors import DaemonUnreachable
from lorad.migrations import MIGRATIONS
from tests.kit.warm.processes import started
from tests.kit.world import REPOSITORY, World, world

OLD, NEW = ("-m", "lorad.daemon"), ("-m", "faults.newer_daemon")
SPEC = """
lora: {rank: 4}
algorithm: {group_size: 2}
data: {train: sort, prompts_per_step: 2}
trainer: {steps: 100000}
reward: {name: "slow.py:score", workers: 1}
rollout: {max_new_tokens: 6}
eval: {every: 0}
checkpoint: {every: 1000}
"""
# Runs go on all the while; they need not be quick. Rewards differ, so that each step makes a version.
SLOW = """
import itertools, time
numbers = itertools.count()
def score(completion):
    time.sleep(0.1)
    return float(next(numbers) % 2)
"""


class Upgrade:
    """One home, its runs, and one daemon after the other."""

    def __init__(self, made: World, runs: int) -> None:
        self.made, self.client = made, made.client
        self.names = [f"job-{number}" for number in range(runs)]
        self.env = os.environ | {"LORAD_HOME": str(made.home.root), "PYTHONPATH": str(REPOSITORY)}
        self.daemon: subprocess.Popen[bytes] | None = None
        self.pids: dict[str, int] = {}
        self.known: dict[str, Any] = {}

    def spawn(self, *argv: str) -> subprocess.Popen[bytes]:
        with open(self.made.root / "daemon.out", "ab") as out, open(os.devnull, "rb") as nothing:
            return started(argv, self.env, "/", [nothing.fileno(), out.fileno(), out.fileno()], detached=True)

    def start(self, *argv: str) -> None:
        self.daemon = self.spawn(*argv)
        self.made.until(self.answers, "the daemon answers", 60)

    def answers(self) -> bool:
        try:
            return bool(self.daemon and self.client.status().pid == self.daemon.pid)
        except DaemonUnreachable:
            return False

    def end(self, number: signal.Signals) -> None:
        assert self.daemon is not None
        self.daemon.send_signal(number)
        assert self.daemon.wait(20) == (0 if number == signal.SIGTERM else -number)

    def begin(self) -> None:
        """Runs at work under the daemon of today."""
        self.start(*OLD)
        (self.made.root / "slow.py").write_text(SLOW)
        for name in self.names:
            self.client.run(SPEC, source=name, cwd=str(self.made.root), overrides=[], name=name)
        for name in self.names:
            self.made.reached(name, 2)
        self.client.pin(f"{self.names[0]}@1")
        self.pids, self.known = self.processes(), self.facts()

    def processes(self) -> dict[str, int]:
        return {
            f"{name}: {p.role}": p.pid or 0 for name in self.names for p in self.client.show(name).processes
        }

    def facts(self) -> dict[str, Any]:
        """What is known so far: it may only grow."""
        known: dict[str, Any] = {}
        for name in self.names:
            known |= {
                f"{name} step {s.step}": (s.version, s.metrics.get("loss")) for s in self.client.steps(name)
            }
            known |= {f"{name}@{v.version}": (v.sha256, v.pinned) for v in self.client.adapters(name)}
        return known

    def goes_on(self, what: str) -> None:
        """The same processes, more steps, and nothing that is not known any more."""
        assert self.processes() == self.pids, (
            f"{what}: the processes are {self.processes()}, were {self.pids}"
        )
        for name in self.names:
            self.made.reached(name, self.client.show(name).step + 1)
        facts = self.facts()
        lost = {key: value for key, value in self.known.items() if facts.get(key) != value}
        assert not lost, f"{what}: lost {lost}"
        self.known = facts
        print(f"{what:<44} {len(self.pids)} processes as before, {len(facts)} facts, 0 lost", flush=True)

    def schema(self) -> str:
        return self.client.status().database.schema or ""

    def copy(self) -> Path:
        return self.made.home.database.with_name(f"{self.made.home.database.name}.before-{NAME}")

    def killed_amid(self, point: str) -> None:
        """Kill the successor at a point of its start; then today's daemon still works."""
        self.end(signal.SIGKILL)
        killed = self.spawn(*NEW, point)
        assert killed.wait(60) == -signal.SIGKILL, f"it was not killed {point}"
        self.start(*OLD)
        assert self.schema() == MIGRATIONS._migrations[-1].name
        self.goes_on(f"kill -9 {point}, back to the old one")

    def upgraded(self) -> None:
        self.end(signal.SIGTERM)
        self.start(*NEW)
        assert self.schema() == NAME
        with contextlib.closing(sqlite3.connect(f"file:{self.copy()}?mode=ro", uri=True)) as copy:
            assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert copy.execute("SELECT count(*) FROM runs").fetchone() == (len(self.names),)
        self.goes_on("SIGTERM, then the new one")
        self.end(signal.SIGKILL)
        self.start(*NEW)
        self.goes_on("kill -9 of the new one, the new one again")

    def refused(self) -> str:
        """What the older daemon says of the newer database; nothing has changed then."""
        self.end(signal.SIGKILL)
        done = subprocess.run(
            [sys.executable, *OLD], env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1 and NAME in done.stderr, done.stderr
        print(f"the old one refuses: {done.stderr.strip()}", flush=True)
        return done.stderr

    def way_back(self, said: str) -> None:
        """Type the command that the refusal names."""
        (command,) = re.findall(r"`(lorad doctor[^`]*)`", said)
        done = self.made.lorad(*shlex.split(command)[1:])
        print(
            f"`{command}`: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'done'}",
            flush=True,
        )
        self.start(*OLD)
        assert self.schema() == MIGRATIONS._migrations[-1].name
        self.goes_on("the way back to the old one")


def upgrade(runs: int, points: tuple[str, ...] = KILLS) -> None:
    """The whole journey. Raises AssertionError."""
    with world() as made:
        journey = Upgrade(made, runs)
        journey.begin()
        for point in points:
            journey.killed_amid(point)
        journey.upgraded()
        journey.way_back(journey.refused())
        for name in journey.names:
            made.client.kill(name)
        journey.end(signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2)
    begun = time.monotonic()
    try:
        upgrade(parser.parse_args().runs)
    except AssertionError as error:
        traceback.print_exception(error)
        return 1
    print(
        "an upgrade and its way back under running jobs: nothing stopped or lost "
        f"({time.monotonic() - begun:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
