"""`make bench-history`: commands in a home with a long history against the same in an empty one.

    python -m benchmarks.load.history [--runs 1000] [--steps 1000] [--rounds 7] [--json FILE]

Each command is a cold start of the CLI; the two homes take turns. Then the daemon of the long one is watched,
idle.
"""

import argparse
import json
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from lorad.protocol.journal import AttemptFact, EndFact, Record, StepFact, VersionFact, encode
from lorad.spec.model import convert, to_json
from lorad.states import EndReason, Move
from lorad.store import runs
from lorad.store.db import Store
from lorad.store.ingest import ingest
from tests.kit.world import World, world

COMMANDS = (("list",), ("show", "NEWEST"), ("plot", "NEWEST"), ("adapters", "NEWEST"), ("list", "--all"))
LIMIT = 1.5
JUDGED = 3  # of the commands, the first so many
IDLE_SECONDS = 10.0
NAMES = (
    "reward_std",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "lr",
    "clip_fraction",
    "response_length",
    "tokens",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("runs", 1000), ("steps", 1000), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with world() as long, world() as empty:
        seconds = fill(long, options.runs, options.steps)
        fill(empty, 1, min(options.steps, 1000))
        size = long.home.database.stat().st_size / 1e6
        print(
            f"{options.runs} runs of {options.steps} steps: {size:.0f} MB, written in {seconds:.0f} s",
            flush=True,
        )
        found = compared(long, empty, options.rounds) | idle(long)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(any(found[" ".join(command)]["times"] > LIMIT for command in COMMANDS[:JUDGED]))


def fill(made: World, count: int, steps: int) -> float:
    """Runs that ended: the first as its driver and a daemon would have left it, the others with copies of its
    rows.
    """
    started = time.monotonic()
    made.home.runs.mkdir(parents=True)
    store = Store(made.home.database)
    store._connection.execute("PRAGMA synchronous = OFF")  # it is not that which is measured
    for number in range(count):
        name = f"run-{number:04d}"
        directory = made.home.run(name)
        directory.root.mkdir()
        text, where = (
            to_json(convert({"name": name, "trainer": {"steps": steps}})).decode(),
            str(directory.root),
        )
        with store.write() as connection:
            runs.create(
                store, name=name, owner="me", spec_json=text, directory=where, steps=steps, priority=0
            )
            runs.begin_attempt(store, name, resumed_from=None)
            runs.move(store, name, Move.PLACE)
            if number == 0:
                directory.journal.write_bytes(b"".join(map(encode, records(name, steps, random.Random(0)))))
                ingest(store, name, directory.journal)
            else:
                copied(connection, name)
            runs.end_attempt(store, name, 1, exit_code=0, signal=None, reason="completed")
            runs.move(store, name, Move.END, reason=EndReason.COMPLETED)
    store.close()
    return time.monotonic() - started


def copied(connection: sqlite3.Connection, name: str) -> None:
    for table in ("steps", "versions", "events"):
        columns = [
            row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] not in ("id", "run")
        ]
        listed = ", ".join(f'"{column}"' for column in columns)
        rest = "AND kind IN ('attempt', 'step', 'version', 'end')" if table == "events" else ""
        sql = (
            f"INSERT INTO {table} (run, {listed}) SELECT ?, {listed} FROM {table} WHERE run = 'run-0000' "
            f"{rest}"
        )
        connection.execute(sql, (name,))
    values = ", ".join(
        f"{key} = (SELECT {key} FROM runs WHERE name = 'run-0000')" for key in ("step", "reward", "version")
    )
    connection.execute(f"UPDATE runs SET {values} WHERE name = ?", (name,))


def records(name: str, steps: int, chance: random.Random) -> list[Record]:
    found: list[Record] = []

    def add(kind: str, step: int, fact: Any) -> None:
        data = msgspec.to_builtins(fact)
        found.append(Record(1, len(found) + 1, name, 1, step, kind, time.time(), data))

    add("attempt", 0, AttemptFact(1, steps, "tiny-1", "00", None, 100))
    for step in range(1, steps + 1):
        metrics = {"reward": chance.random(), "seconds": 0.1, "tokens_per_second": 100.0}
        metrics |= {name: chance.random() for name in NAMES}
        add("step", step, StepFact(step - 1, ["p1"], step - 1, f"samples/{step}", "ab", metrics))
        if step % 100 == 0:
            path = f"versions/{step:06d}"
            add(
                "version",
                step,
                VersionFact(step, f"{step:064x}", None, path, 8, 16.0, 100, "passed", "delivered"),
            )
    add("end", steps, EndFact("completed", "done"))
    return found


def compared(long: World, empty: World, rounds: int) -> dict[str, Any]:
    for made in (long, empty):
        made.lorad("daemon", "start")
    print(f"{'command':<24}{'empty ms':>10}{'long ms':>10}{'times':>8}", flush=True)
    found: dict[str, Any] = {}
    for command in COMMANDS:
        took: dict[str, list[float]] = {"long": [], "empty": []}
        for _ in range(rounds):
            for kind, made in (("long", long), ("empty", empty)):
                newest = made.client.list(all=True, limit=1)[0].name
                took[kind].append(cold(made, [newest if word == "NEWEST" else word for word in command]))
        medians = {kind: 1e3 * statistics.median(values) for kind, values in took.items()}
        times = statistics.median(a / b for a, b in zip(took["long"], took["empty"], strict=True))
        print(
            f"{' '.join(command):<24}{medians['empty']:>10.0f}{medians['long']:>10.0f}{times:>8.2f}",
            flush=True,
        )
        found[" ".join(command)] = medians | {"times": times}
    return found


def cold(made: World, command: list[str]) -> float:
    environment = os.environ | {"LORAD_HOME": str(made.home.root)}
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "lorad", *command], env=environment, capture_output=True, check=True
    )
    return time.perf_counter() - started


def idle(made: World) -> dict[str, Any]:
    daemon = psutil.Process(made.client.status().pid)
    time.sleep(3.0)
    before, started = daemon.cpu_times(), time.monotonic()
    time.sleep(IDLE_SECONDS)
    after, seconds = daemon.cpu_times(), time.monotonic() - started
    share = (after.user + after.system - before.user - before.system) / seconds
    memory = daemon.memory_info().rss
    print(f"the daemon of the long one: {memory / 1e6:.0f} MB, idle {100 * share:.2f} % of a core")
    return {"memory": memory, "idle": share}


if __name__ == "__main__":
    sys.exit(main())
