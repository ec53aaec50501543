"""Sweeps, where a run comes from, and which bases stay warm to be served.

runs.sweep: the sweep that started it. runs.origin: `run@version` that it was forked from, or the directory
that it was imported from. runs.serving: 1 keeps a pool of its base up though no run works there.
"""

from __future__ import annotations

from sqlite_utils import Database

COLUMNS = ("sweep TEXT", "origin TEXT", "serving INTEGER NOT NULL DEFAULT 0")

SWEEPS = """
CREATE TABLE sweeps (
  sweep TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  created_at REAL NOT NULL,
  grid TEXT NOT NULL CHECK (json_valid(grid)),
  halving TEXT CHECK (halving IS NULL OR json_valid(halving)),
  rungs TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(rungs))
) STRICT
"""

INDEXES = (
    "CREATE INDEX runs_by_sweep ON runs (sweep) WHERE sweep IS NOT NULL",
    "CREATE INDEX runs_that_serve ON runs (name) WHERE serving = 1",
    "CREATE INDEX versions_that_are_pinned ON versions (run, version) WHERE pinned = 1",
    "CREATE INDEX alias_moves_by_alias ON alias_moves (alias, id)",
)


def apply(db: Database) -> None:
    for column in COLUMNS:
        db.conn.execute(f"ALTER TABLE runs ADD COLUMN {column}")
    for statement in (SWEEPS, *INDEXES):
        db.conn.execute(statement)
