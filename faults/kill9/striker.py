"""Whom to kill and when: a deck of strikes that has every victim, every phase and every exact point."""

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass

from faults.kill9.box import Box, Process
from faults.kill9.runs import KINDS, Crew
from lorad.errors import LoradError

PHASES = (
    "starting",
    "resume",
    "sampling",
    "training",
    "publish",
    "recording",
    "checkpoint",
    "evaluating",
    "stopping",
)
ALONE = ("driver", "daemon", "pool", "driver-shim", "pool-shim")
HELPERS = {"env-host": "env", "reward-worker": "reward"}  # and the key of kinds that have them
OF_HELPERS = ("sampling", "sampling", "scoring", "evaluating", "any")
TOGETHER = (
    ("env-host", "driver"),
    ("env-host", "pool"),
    ("reward-worker", "pool"),
    ("driver", "driver-shim"),
    ("driver", "daemon"),
    ("pool", "pool-shim"),
    ("pool", "daemon"),
    ("driver", "pool", "daemon"),
    ("driver-shim", "daemon"),
)
EVERYTHING = ("everything",)
POINTS = {
    "daemon": (
        ("commit", 12),
        ("statement", 60),
        ("journal", 3),
        ("journaled", 3),
        ("fsync", 12),
        ("fsynced", 12),
        ("rename", 4),
        ("renamed", 4),
        ("spawn", 1),
        ("spawned", 0),
        ("spawned", 0),
        ("migration", 4),
        ("migration", 4),
    ),
    "driver": (
        ("journal step", 2),
        ("journaled step", 2),
        ("journal version", 2),
        ("journaled version", 2),
        ("renamed", 1),
        ("journal checkpoint", 1),
        ("journaled checkpoint", 1),
        ("journal attempt", 0),
        ("journal rewind", 0),
        ("journaled rewind", 0),
        ("rename", 1),
        ("fsync", 8),
        ("journal end", 0),
        ("journaled end", 0),
    ),
    "pool": (("rename", 4), ("renamed", 4), ("fsync", 20), ("fsynced", 20)),
    "driver-shim": (
        ("before the fork", 0),
        ("between fork and status", 0),
        ("before the status", 0),
        ("between status and program", 0),
        ("between end and status", 0),
    ),
    "pool-shim": (
        ("between fork and status", 0),
        ("between status and program", 0),
        ("between end and status", 0),
    ),
}
WAIT_SECONDS = 5.0  # until a trap springs
POOL_SECONDS = 8.0  # until drivers have a pool
PHASE_SECONDS = 2.0  # for a phase, while drivers work


@dataclass(frozen=True)
class Strike:
    """phase: of a driver, "any", "daemon starting" or "idle". point: where a process kills itself instead."""

    victims: tuple[str, ...]
    phase: str = "any"
    point: str = ""
    most: int = 0

    @property
    def victim(self) -> str:
        return "+".join(self.victims)


def deck(chance: random.Random) -> list[Strike]:
    """Shuffled within three parts, which alternate: who and when; several at once; exact points."""
    ones = [Strike((victim,), phase) for victim in ALONE for phase in (*PHASES, "any")]
    ones += [Strike((victim,), phase) for victim in HELPERS for phase in OF_HELPERS]
    ones += [Strike((victim,), "daemon starting") for victim in ALONE for _ in range(2)]
    many = [Strike(victims, chance.choice(PHASES)) for victims in TOGETHER * 3]
    many += [Strike(EVERYTHING, phase) for phase in (*PHASES, "any", "daemon starting")]
    points = [
        Strike((role,), point=point, most=most) for role, several in POINTS.items() for point, most in several
    ]
    for part in (ones, many, points):
        chance.shuffle(part)
    cards: list[Strike] = []
    while ones or many or points:
        cards += [part.pop() for part in (ones, points, many, points, ones) if part]
    return cards


class Striker:
    def __init__(self, box: Box, crew: Crew, chance: random.Random) -> None:
        self.box, self.crew, self.chance = box, crew, chance
        self.traps = 0

    def strike(self, strike: Strike) -> tuple[str, list[str]]:
        """The phase in which it struck, and the roles of those that it killed; [] when nobody was there."""
        if strike.point == "migration":
            return self._migration(strike)
        if strike.point:
            return strike.point, [strike.victim] if self._trap(strike) else []
        run, phase = self._await(strike.phase, strike.victims)
        time.sleep(
            self.chance.choice((0.0, 0.0, self.chance.uniform(0.0, 0.03), self.chance.uniform(0.0, 0.2)))
        )
        found = self._victims(strike.victims, run)
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return phase, [process.role for process in found]

    def _await(self, phase: str, victims: tuple[str, ...] = ()) -> tuple[str, str]:
        """A run whose driver is in `phase`, or whatever there is when none comes to be in it:
        run and phase. Only runs that have what is to be killed.
        """
        keys = [HELPERS[victim] for victim in victims if victim in HELPERS]
        if phase == "daemon starting":
            return self._restarted(), phase
        if phase == "stopping":
            self._ask_to_stop()
        begun = time.monotonic()
        while True:
            phases = {
                run: told
                for run, told in self._phases().items()
                if all(key in KINDS[self.crew.names[run]] for key in keys)
            }
            if meant := [run for run, told in phases.items() if told == phase]:
                return self.chance.choice(meant), phase
            waited = time.monotonic() - begun
            at_work = set(phases.values()) - {"starting", "resume"}
            if phase in ("any", "idle") or waited > (PHASE_SECONDS if at_work else POOL_SECONDS):
                run = self.chance.choice(list(phases)) if phases else ""
                return run, phases.get(run, "idle")
            time.sleep(0.002)

    def _phases(self) -> dict[str, str]:
        """Map each run with a living driver to its phase."""
        return {run: told for run in self.crew.working if (told := self.box.phase(run))}

    def _ask_to_stop(self) -> None:
        """What a graceful stop is under way for is killed amid it."""
        names = list(self._phases())
        for name in self.chance.sample(names, len(names)):
            ask = self.chance.choice((self.box.client.pause, self.box.client.stop))
            self.crew.stopped.add(name)
            with contextlib.suppress(LoradError):
                self.crew.accepted.append((name, "stop", ask(name).attempt))
                return

    def _restarted(self) -> str:
        """Kill the daemon and wait until the next one is begun."""
        before = self.box.started
        for daemon in self.box.daemons[:]:
            daemon.kill()
        deadline = time.monotonic() + WAIT_SECONDS
        while self.box.started == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(self.chance.uniform(0.0, 0.6))
        return self.chance.choice(self.crew.working or [""])

    def _victims(self, wanted: tuple[str, ...], run: str) -> list[Process]:
        """List the victims: drivers and shims of `run` alone, one pool, the daemon, or every process."""
        processes = self.box.processes()
        if wanted == EVERYTHING:
            return processes
        fitting = [p for p in processes if p.role in wanted and p.run in ("", run)]
        fitting += [p for p in self.box.helpers(run) if p.role in wanted]
        pools = sorted({p.what.split("/attempts/")[0] for p in fitting if p.role in ("pool", "pool-shim")})
        pool = self.chance.choice(pools) if pools else ""
        return [p for p in fitting if p.role not in ("pool", "pool-shim") or p.what.startswith(pool)]

    def _trap(self, strike: Strike) -> bool:
        """Let the next process of a role kill itself at a point; whether one did."""
        self.traps += 1
        trap = {"id": str(self.traps), "role": strike.victim, "point": strike.point}
        path, sprung = self.box.root / "trap.json", self.box.root / "sprung.json"
        sprung.unlink(missing_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps(trap | {"after": self.chance.randint(0, strike.most)}))
        path.with_suffix(".tmp").rename(path)
        self._provoke(strike)
        deadline = time.monotonic() + WAIT_SECONDS
        while not sprung.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        path.unlink(missing_ok=True)
        return sprung.exists()

    def _provoke(self, strike: Strike) -> None:
        """Ends and beginnings happen seldom by themselves."""
        if strike.point in ("journal end", "journaled end"):
            self._ask_to_stop()
        wanted = {"journal attempt": "driver", "journal rewind": "driver", "journaled rewind": "driver"}.get(
            strike.point
        )
        if strike.victim.endswith("shim"):
            wanted = strike.victim.removesuffix("-shim")
        if strike.point in ("spawn", "spawned"):
            wanted = "driver"
        if wanted:
            for process in self._victims((wanted,), self._await("any")[0]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def _migration(self, strike: Strike) -> tuple[str, list[str]]:
        """The next daemon is of a lorad to come, and dies amid the migration of the database."""
        path = self.box.root / "migrations"
        path.write_text(str(int(path.read_text() if path.exists() else 0) + 1))
        for daemon in self.box.daemons[:]:
            daemon.kill()
        return strike.point, ["daemon"] if self._trap(strike) else []
