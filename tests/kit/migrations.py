"""Migrations of a lorad to come."""

from collections.abc import Callable

from sqlite_utils import Database, Migrations

from lorad.migrations import MIGRATIONS


def extended(*more: Callable[[Database], None]) -> Migrations:
    """Return the migrations of today and `more`, which are named by their functions."""
    longer = Migrations(MIGRATIONS.name)
    for migration in MIGRATIONS._migrations:
        longer(name=migration.name)(migration.fn)
    for apply in more:
        longer(name=apply.__name__)(apply)
    return longer


def m9998_colours(database: Database) -> None:
    database.conn.execute("ALTER TABLE runs ADD COLUMN colour TEXT NOT NULL DEFAULT 'green'")
