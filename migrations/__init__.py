"""The schema of the store, one migration per change. A migration that was released never changes."""

from sqlite_utils import Migrations

from lorad.migrations import m0001_first_schema

MIGRATIONS = Migrations("lorad.schema")  # databases of before the first release have "lorad" or "lorad.store"
for _module in (m0001_first_schema,):
    MIGRATIONS(name=_module.__name__.rpartition(".")[2])(_module.apply)
