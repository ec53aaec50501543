"""Kill -9 at random instants of whatever a run over two nodes consists of; it ends as if nobody had.

    python -m faults.kill9_nodes [--kills 20] [--seed 0]

Both nodes are this machine: agents of a static grant, with two ranks of fsdp, one on each. Victims are a
rank, a launcher, a guard and an agent, on either node, the grant process, the pool, the driver and the
daemon, each as often as the others. The run resumes by itself (restart: on-failure). In the end its steps,
batches and final digest must be those of the same run on one machine that nobody disturbed, its journal and
samples are audited, and no process of the home may be left. Exits 1 where one of these does not hold.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from lorad.daemon.process.processes import read_status
from lorad.daemon.record.audit import audit
from lorad.errors import Conflict, DaemonUnreachable
from tests.kit.world import World, world
from tests.nodes.spread import NAME, alone, granted, life, start, steps_of

_ON_NODES = ("rank", "launcher", "guard", "agent")
_VICTIMS = (*_ON_NODES, "grant", "pool", "driver", "daemon")
_SECONDS = 300.0  # for the run to be where the next kill is due
_LEFT_SECONDS = 20.0  # for processes to go, once daemon and pools were stopped


def _deck(chance: random.Random) -> Iterator[str]:
    while True:
        yield from chance.sample(_VICTIMS, len(_VICTIMS))


def _furthest(made: World) -> int:
    attempts = made.client.show(NAME).attempts
    return max((step for one in attempts for step in steps_of(made, one.attempt)), default=0)


def _wait(made: World, step: int) -> bool:
    """Wait until the run is that far, or over; what is over before its time is resumed. Returns whether it is
    complete.
    """
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        try:
            run = made.client.show(NAME)
            if run.reason == "completed" or (run.state == "running" and _furthest(made) >= step):
                return run.reason == "completed"
            if run.state in ("ended", "paused"):
                made.client.resume(NAME)
        except DaemonUnreachable:
            made.lorad("daemon", "start")
        except Conflict:
            pass
        time.sleep(0.05)
    raise SystemExit(f"not at step {step} after {_SECONDS:.0f} s: {made.client.show(NAME)}")


def _pid(made: World, victim: str, node: int) -> int:
    """Raises psutil.Error, LookupError and OSError where there is no such process now."""
    if victim == "daemon":
        return made.client.status().pid
    if victim == "driver":
        return next(p.pid or 0 for p in made.client.show(NAME).processes if p.role == "driver")
    pool: int = (read_status(life(made)) or {})["pid"]
    if victim == "pool":
        return pool
    if victim == "grant":
        below = psutil.Process(pool).children(recursive=True)
        return next(p.pid for p in below if "lorad.grants.static" in p.cmdline() and not _is_guard(p))
    process = psutil.Process(granted(made).nodes[node].pid)
    for kind in ("guard", "launcher", "rank"):
        if victim == "agent":
            break
        (process,) = process.children()
        if kind == victim:
            break
    return process.pid


def _is_guard(process: psutil.Process) -> bool:
    return any(part.endswith("guard.py") for part in process.cmdline())


def _kill(made: World, victim: str, node: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        try:
            os.kill(_pid(made, victim, node), signal.SIGKILL)
            return
        except (psutil.Error, OSError, LookupError, ValueError, StopIteration, DaemonUnreachable):
            time.sleep(0.05)
    raise SystemExit(f"there is no {victim}")


def _left(made: World) -> list[str]:
    """List what is left of the home's processes, once there should be none."""
    made.lorad("daemon", "stop", "--pools", "--gateway")
    mark, deadline = f"LORAD_HOME={made.home.root}\0".encode(), time.monotonic() + _LEFT_SECONDS
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _marked(mark: bytes) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def _disturbed(made: World, kills: int, chance: random.Random) -> Counter[str]:
    """Kill as the run advances, until it is complete; returns whom, and how often."""
    done: Counter[str] = Counter()
    for number, victim in zip(range(1, kills + 1), _deck(chance), strict=False):
        if _wait(made, _furthest_seen(made) + chance.randint(1, 2)):
            return done
        time.sleep(chance.uniform(0.0, 0.6))
        node, began = chance.randint(0, 1), time.monotonic()
        _kill(made, victim, node)
        done[victim] += 1
        where = f" on h{node + 1}" if victim in _ON_NODES else ""
        print(f"kill {number}/{kills}: {victim}{where} ({time.monotonic() - began:.1f} s)", flush=True)
    _wait(made, sys.maxsize)
    return done


def _furthest_seen(made: World) -> int:
    try:
        return _furthest(made)
    except DaemonUnreachable:
        made.lorad("daemon", "start")
        return _furthest(made)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps, began = 4 * options.kills, time.monotonic()
    with world() as made:
        expected = alone(made, steps)
        print(f"undisturbed, on one machine: {time.monotonic() - began:.0f} s", flush=True)
        start(made, steps)
        done = _disturbed(made, options.kills, random.Random(options.seed))
        got, attempts = made.facts(NAME), made.client.show(NAME).attempt
        found = [f"{key} differ from undisturbed" for key in expected if got[key] != expected[key]]
        found += [f"audit: {wrong}" for wrong in audit(Path(made.client.show(NAME).directory))]
        found += [f"left: {line}" for line in _left(made)]
    whom = ", ".join(f"{name} {count}" for name, count in sorted(done.items()))
    print(f"{time.monotonic() - began:.0f} s")
    print(f"{done.total()} kills ({whom}), {steps} steps in {attempts} attempts: {len(found)} exceptions")
    print("\n".join(found) or "steps, samples and the final digest are those of the undisturbed run")
    return 1 if found or done.total() < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
