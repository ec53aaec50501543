"""Freeze the newest schema, with rows in every table, as tests/data/<migration>.db: once per release that
changes it.

    python tests/kit/freeze_schema.py

A frozen database is never written again: `tests/store/test_migrations.py` opens every one of them for ever.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(DATA.parent.parent))

from lorad.protocol.journal import JournalWriter  # noqa: E402
from lorad.states import EndReason, Move  # noqa: E402
from lorad.store import pools, runs, sweeps  # noqa: E402
from lorad.store.db import Store  # noqa: E402
from lorad.store.ingest import ingest  # noqa: E402
from lorad.store.rows import Halving, Rung  # noqa: E402
from tests.kit.journals import begin, checkpoint, end, evaluation, new_run, step, version  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "lorad.db")
        fill(store, Path(directory) / "journal.jsonl")
        frozen = DATA / f"{store.schema}.db"
        if frozen.exists():
            sys.exit(f"{frozen} is frozen")
        store.close()
        freeze(store.path, frozen)
    print(frozen)


def fill(store: Store, journal: Path) -> None:
    """A run that was forked, resumed, ended and is served, one of a sweep in the queue, a pool, a lease, an
    alias.
    """
    new_run(store)
    runs.begin_attempt(store, "sorter", resumed_from=None)
    with JournalWriter(journal, "sorter", 1) as writer:
        begin(writer)
        for number in (1, 2):
            step(writer, number)
            version(writer, number, number)
        evaluation(writer, 2, 0.5)
        checkpoint(writer, 2)
    with JournalWriter(journal, "sorter", 2) as writer:
        begin(writer, resumed_from=1)
        step(writer, 2)
        version(writer, 2, 3)
        end(writer, 2)
    ingest(store, "sorter", journal)
    runs.end_attempt(store, "sorter", 1, exit_code=None, signal=9, reason="lost")
    runs.move(store, "sorter", Move.END, reason=EndReason.COMPLETED)
    new_run(store, "waiter")
    pools.upsert(store, "tiny-1", state="ready", model="builtin:tiny", mode="fused", device="cpu")
    pools.lease(store, "tiny-1", "cpu", "run sorter")
    halving = Halving(2, [1, 5], "reward")
    sweeps.create(store, "grid", owner="ada", grid={"seed": ["0", "1"]}, halving=halving)
    rung = Rung(1, ["waiter"], [], {"waiter": 0.5}, 1.0)
    sweeps.decide(store, "grid", rung)
    runs.set_fields(store, "waiter", sweep="grid")
    runs.set_fields(store, "sorter", origin="older@7", serving=1)
    with store.write() as connection:
        connection.execute("UPDATE versions SET pinned = 1 WHERE version = 2")
        connection.execute("INSERT INTO aliases VALUES ('bot', 'sorter', 3, 1.0, 1000)")
        connection.execute("INSERT INTO alias_moves VALUES (1, 'bot', 'sorter', 3, 1.0, 'ada')")


def freeze(path: Path, frozen: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript("PRAGMA journal_mode = DELETE; PRAGMA page_size = 1024; VACUUM")
    connection.close()
    frozen.parent.mkdir(exist_ok=True)
    frozen.write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()
