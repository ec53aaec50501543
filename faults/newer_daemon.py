"""A lorad to come: this one, and one migration more.

`python -m faults.newer_daemon [DIE]`, DIE as in `KILLS`.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from lorad.daemon.__main__ import main
from lorad.migrations import MIGRATIONS
from lorad.store.db import Store

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


def die_around(copy: Callable[..., None]) -> Callable[..., None]:
    def copying(*arguments: Any) -> None:
        at("before the copy")
        copy(*arguments)
        at("after the copy")

    return copying


if __name__ == "__main__":
    MIGRATIONS(name=NAME)(apply)
    Store._copy_to = die_around(Store._copy_to)  # type: ignore[method-assign]
    del sys.argv[1:]
    sys.exit(main())
