"""The schema of the store, one migration per change. A migration that was released never changes."""

from __future__ import annotations

from sqlite_utils import Migrations

from lorad.migrations import (
    m0001_first_schema,
    m0002_sweeps_and_serving,
    m0003_shared_box,
    m0004_dashboard,
    m0005_restarts,
)

MIGRATIONS = Migrations("lorad")
for _module in (
    m0001_first_schema,
    m0002_sweeps_and_serving,
    m0003_shared_box,
    m0004_dashboard,
    m0005_restarts,
):
    MIGRATIONS(name=_module.__name__.rpartition(".")[2])(_module.apply)
