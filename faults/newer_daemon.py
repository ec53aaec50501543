"""A lorad to come: this one, and one migration more.

`python -m faults.newer_daemon [DIE]`, DIE as in `KILLS`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lorad import files
from lorad.daemon.__main__ import main
from lorad.migrations import MIGRATIONS
from lorad.store import db

NAME = "m9999_colours"
KILLS = ("before the copy", "after the copy", "amid the migration", "before its commit")
STATEMENTS = (
    "ALTER TABLE runs ADD COLUMN colour TEXT NOT NULL DEFAULT 'green'",
    "CREATE TABLE colours (run TEXT REFERENCES runs (name) ON DELETE CASCADE, colour TEXT NOT NULL) STRICT",
    "INSERT INTO colours SELECT name, 'green' FROM runs",
)
wanted = sys.argv[1] if len(sys.argv) > 1 else ""


def at(point: str) -> None:
    if point == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


def apply(database: Any) -> None:
    for number, statement in enumerate(STATEMENTS):
        if number:
            at("amid the migration")
        database.conn.execute(statement)
    database.conn.set_trace_callback(lambda sql: at("before its commit") if sql == "COMMIT" else None)


def die_around_the_copy() -> None:
    """Die where the copy of the database is begun, or where it is forced to disk under its name."""
    create = db._create
    fsync = files.fsync

    def begin(path: Path) -> None:
        at("before the copy")
        create(path)

    def end(directory: Path) -> None:
        fsync(directory)
        at("after the copy")

    vars(db).update(_create=begin, fsync=end)


if __name__ == "__main__":
    MIGRATIONS(name=NAME)(apply)
    die_around_the_copy()
    del sys.argv[1:]
    sys.exit(main())
