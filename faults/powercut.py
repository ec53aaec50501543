"""make powercut: the power goes at any byte of any write; what was acknowledged is there, and nothing is
half.

A daemon's database and journals live through a random history. After each step that was acknowledged their
bytes are kept. A cut is what the disk may hold when the power goes during the next step: of what was written
since, a prefix, a prefix and then zeros, any set of sectors, or nothing; in the order that fsync grants. From
each cut the home is opened as a daemon does, compared with the two states around the cut, and repaired
without its database to the same.

    python -m faults.powercut --steps 150 --cuts 8 --seed 0
"""

import argparse
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorad.box.paths import Home, RunDir
from lorad.daemon.daemon import prepare
from lorad.daemon.journal import DaemonJournal
from lorad.daemon.open_store import open_store, record
from lorad.daemon.record.repair import repair
from lorad.protocol.journal import JournalWriter
from lorad.spec.model import convert, to_json
from lorad.states import EndReason, Move
from lorad.store import aliases, runs
from lorad.store.check import check
from lorad.store.db import Store
from lorad.store.ingest import ingest
from lorad.store.versions import set_pinned
from tests.kit.journals import TABLES, begin, checkpoint, end, evaluation, step, version

SECTOR = 512
MEMORY = Path("/dev/shm")  # where fsync costs nothing: what it grants is in `rank`
WAL = "lorad.db-wal"
CHECKPOINT_PAGES = 24  # so that the WAL begins anew every few steps
Files = dict[str, bytes]
State = dict[str, list[Any]]


@dataclass
class Daemon:
    """The writer of a home, and the drivers of its runs."""

    home: Home
    chance: random.Random
    store: Store = field(init=False)
    journal: DaemonJournal = field(init=False)
    reached: dict[str, int] = field(default_factory=dict)
    made: int = 0

    def __post_init__(self) -> None:
        prepare(self.home)
        self.store, self.journal = open_store(self.home), DaemonJournal(self.home.journal)
        self.store.rows(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        record(self.store, self.journal)

    def act(self) -> str:
        """One transaction, or what a driver writes, acknowledged when this returns."""
        verbs: list[Callable[[], None]] = [self.create, *[self.drive] * 4, *[self.take_in] * 4]
        verbs += [self.pin, self.swap, self.swap, self.finish, self.remove, self.empty]
        verb = self.chance.choice(verbs) if len(self.reached) > 1 else self.create
        verb()
        return verb.__name__

    def create(self) -> None:
        self.made += 1
        name = f"r{self.made}"
        directory = self.home.run(name).root
        directory.mkdir(parents=True)
        spec = to_json(convert({"name": name})).decode()
        with self.store.write():
            runs.create(
                self.store,
                name=name,
                owner="me",
                spec_json=spec,
                directory=str(directory),
                steps=9,
                priority=0,
            )
            runs.begin_attempt(self.store, name, resumed_from=None)
            runs.move(self.store, name, Move.PLACE)
        with JournalWriter(RunDir(directory).journal, name, 1) as writer:
            begin(writer)
        self.reached[name] = 0

    def drive(self) -> None:
        """A driver writes a record; nobody has taken it in."""
        if (name := self.any()) is None:
            return
        self.reached[name] += 1
        number = self.reached[name]
        with JournalWriter(self.home.run(name).journal, name, 1) as writer:
            step(writer, number, self.chance.random())
            version(writer, number, number)
            if self.chance.random() < 0.4:
                evaluation(writer, number, 0.5)
                checkpoint(writer, number)

    def take_in(self) -> None:
        if name := self.any():
            ingest(self.store, name, self.home.run(name).journal)

    def pin(self) -> None:
        if found := self.store.rows("SELECT run, version, pinned FROM versions"):
            row = self.chance.choice(found)
            set_pinned(self.store, row["run"], row["version"], not row["pinned"], by="me")

    def swap(self) -> None:
        if found := self.store.rows("SELECT run, version FROM versions"):
            row = self.chance.choice(found)
            alias = self.chance.choice(("bot", "cat"))
            aliases.move(self.store, alias, row["run"], row["version"], by="me", uid=7)

    def finish(self) -> None:
        if name := self.any():
            with JournalWriter(self.home.run(name).journal, name, 1) as writer:
                end(writer, self.reached[name])
            with self.store.write():
                ingest(self.store, name, self.home.run(name).journal)
                runs.end_attempt(self.store, name, 1, exit_code=0, signal=None, reason="completed")
                runs.move(self.store, name, Move.END, reason=EndReason.COMPLETED)
            del self.reached[name]

    def remove(self) -> None:
        sql = (
            "SELECT name FROM runs WHERE state = 'ended' AND name NOT IN (SELECT run FROM aliases) "
            "AND name NOT IN (SELECT run FROM versions WHERE pinned = 1)"
        )
        if found := self.store.rows(sql):
            name = self.chance.choice(found)["name"]
            runs.remove(self.store, name)
            shutil.rmtree(self.home.run(name).root)

    def empty(self) -> None:
        self.store.empty_wal()

    def any(self) -> str | None:
        return self.chance.choice(sorted(self.reached)) if self.reached else None

    def close(self) -> None:
        self.store.close()
        self.journal.close()


def files_of(home: Home) -> Files:
    paths = [home.database, home.root / WAL, home.journal, *home.runs.rglob("journal.jsonl")]
    return {str(path.relative_to(home.root)): path.read_bytes() for path in paths if path.exists()}


def state_of(store: Store) -> State:
    """Read the state without when an attempt began to work: a repair takes in the record of that."""
    found = {table: store.rows(f"SELECT * FROM {table} ORDER BY 1, 2, 3") for table in TABLES}
    for run in found["runs"]:
        del run["waiting"]
        run["signals"] = {key: value for key, value in json.loads(run["signals"]).items() if key != "begun"}
    return found


def cut_of(before: Files, after: Files, chance: random.Random) -> tuple[str, Files]:
    """What may be on disk: writes in the order in which they were fsynced, the last of them only in part."""
    is_emptied = len(after.get(WAL, b"")) < len(before.get(WAL, b""))
    order = [
        name for name in sorted(after, key=lambda n: rank(n, is_emptied)) if before.get(name) != after[name]
    ]
    torn = chance.choice(order)
    cut = {name: data for name, data in before.items() if name in after or not name.startswith("runs/")}
    for name in order[: order.index(torn)]:
        cut[name] = after[name]
    how = chance.choice(("prefix", "zeros", "sectors", "nothing"))
    cut[torn] = torn_bytes(how, before.get(torn, b""), after[torn], chance)
    return f"{how} of {'a run' if torn.startswith('runs/') else Path(torn).name}", cut


def rank(name: str, is_emptied: bool) -> tuple[float, str]:
    """A run's journal is fsynced before it is taken in, the daemon's before the commit, the WAL before what
    is in it goes to the database, and the database before the WAL is emptied."""
    if name.startswith("runs/"):
        return 0, name
    return {"journal.jsonl": 1, WAL: 2}.get(name, 1.5 if is_emptied else 3), name


def torn_bytes(how: str, before: bytes, after: bytes, chance: random.Random) -> bytes:
    place = chance.randint(0, len(after))
    if how == "prefix":
        return after[:place] + before[place:]
    if how == "zeros":
        place = max(place, min(len(before), len(after)))
        return after[:place] + bytes(len(after) - place)
    if how == "sectors":
        old = before.ljust(len(after), b"\0")[: len(after)]
        starts = range(0, len(after), SECTOR)
        return b"".join((after if chance.random() < 0.5 else old)[start : start + SECTOR] for start in starts)
    return before


def judge(cut: Files, before: State, after: State, directory: Path) -> str:
    """Why a cut is not as it must be; "" when it is."""
    home = Home(directory)
    for name, data in cut.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    try:
        daemon = Daemon(home, random.Random(0))
    except Exception as error:  # whatever it is, it is to be told with the cut
        return f"the daemon does not open it: {error!r}"
    found = state_of(daemon.store)
    daemon.close()
    if found not in (before, after):
        return f"neither the state before nor after: {differences(before, found)}"
    if problems := check(home.database).problems:
        return f"damaged: {problems}"
    for path in directory.glob("lorad.db*"):
        path.unlink()
    repair(home)
    store = Store(home.database)
    again = state_of(store)
    store.close()
    behind = untaken(home, found)
    wrong = [table for table in TABLES if table != "events" and again[table] != found[table] and not behind]
    return f"repaired, it differs in {', '.join(wrong)}: {differences(found, again)}" if wrong else ""


def untaken(home: Home, state: State) -> bool:
    """Return whether journals have more than was taken in: a repair takes in all."""
    facts = [row for table in ("steps", "versions", "evals", "checkpoints") for row in state[table]]
    taken = Counter({run["name"]: 1 for run in state["runs"]})
    for row in facts:
        taken[row["run"]] = max(taken[row["run"]], row["seq"])
    return any(
        path.read_bytes().count(b"\n") > taken[path.parent.name] for path in home.runs.rglob("journal.jsonl")
    )


def differences(one: State, other: State) -> str:
    return "; ".join(f"{t}: {len(one[t])} rows, then {len(other[t])}" for t in TABLES if one[t] != other[t])


def play(seed: int, steps: int, cuts: int) -> tuple[Counter[str], str]:
    """How many cuts of each kind went well, and the first that did not."""
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="lr-", dir=MEMORY if MEMORY.is_dir() else None) as root:
        home = Path(root) / "home"
        daemon = Daemon(Home(home), chance)
        files, state = files_of(daemon.home), state_of(daemon.store)
        for number in range(steps):
            verb = daemon.act()
            now, then = files_of(daemon.home), state_of(daemon.store)
            for _ in range(cuts if now != files else 0):
                told, cut = cut_of(files, now, chance)
                if why := judged(cut, (state, then), home):
                    return done, f"step {number} ({verb}), {told}: {why}"
                done[told] += 1
            files, state = now, then
        daemon.close()
    return done, ""


def judged(cut: Files, states: tuple[State, State], home: Path) -> str:
    """In the place of the home, as its rows name directories below it; the home itself waits aside."""
    aside = home.with_name("aside")
    home.rename(aside)
    try:
        return judge(cut, *states, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        aside.rename(home)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--cuts", type=int, default=8, help="for each step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    print(
        f"SQLite {sqlite3.sqlite_version}, seed {options.seed}: {options.steps} steps, {options.cuts} cuts "
        "each",
        flush=True,
    )
    done, failed = play(options.seed, options.steps, options.cuts)
    for told, count in sorted(done.items()):
        print(f"{told:<32}{count:>6} cuts, all acknowledged facts there")
    print(f"{sum(done.values())} cuts in {time.monotonic() - started:.0f} s, {1 if failed else 0} failed")
    if failed:
        print(f"FAILED  {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
