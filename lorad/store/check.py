"""Check whether the database is whole, and whether the SQLite of this Python can be trusted.

For `lorad doctor`.
"""

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path

from msgspec import Struct
from sqlite_utils import Database

from lorad.errors import LoradError
from lorad.store.db import refuse_other_schema

# https://sqlite.org/wal.html#walresetbug; later branches have it
_FIXED = ((3, 44, 6), (3, 50, 7), (3, 51, 3))


class CheckReport(Struct, frozen=True):
    """The result of a check.

    problems: damage to the database.
    warnings: what could be better, though nothing is damaged.
    """

    problems: list[str]
    warnings: list[str]


def check(path: Path) -> CheckReport:
    """Read the whole database and change nothing. A daemon may write to it meanwhile."""
    warning = version_warning(sqlite3.sqlite_version_info)
    warnings = [warning] if warning else []
    if not path.exists():
        return CheckReport([], warnings)
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            damage = [row[0] for row in connection.execute("PRAGMA quick_check") if row[0] != "ok"]
            broken = Counter((row[0], row[2]) for row in connection.execute("PRAGMA foreign_key_check"))
            refuse_other_schema(path, Database(connection))
            if "runs" not in Database(connection).table_names():
                problem = f"{path} has no tables: the daemon that made it ended at once"
                return CheckReport([problem], warnings)
    except sqlite3.DatabaseError as error:
        return CheckReport([f"{path}: {error}"], warnings)
    except LoradError as error:
        return CheckReport([error.message], warnings)
    problems = [f"{path}: {problem}" for problem in damage]
    for (table, parent), count in broken.items():
        problems.append(f"{path}: {count} rows of {table} refer to rows of {parent} that are not there")
    return CheckReport(problems, warnings)


def version_warning(version: tuple[int, int, int]) -> str:
    """Say what is wrong with a version of SQLite; "" when nothing is."""
    if version >= _FIXED[-1] or any(version[:2] == fixed[:2] and version >= fixed for fixed in _FIXED):
        return ""
    return (
        f"SQLite {'.'.join(map(str, version))} can damage a database to which two processes write at the "
        "same instant (the WAL-reset bug, fixed in 3.51.3). Only the daemon writes to lorad's; open it "
        f"with other tools read-only, or use a Python with a newer SQLite."
    )
