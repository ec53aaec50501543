"""The schema of the store, one migration per change. A migration that was released never changes.

It gets a database of any released schema, or an empty one, and leaves the newest.

A change is a new file and its name in the list below. `tests/store/test_migrations.py` holds upgrades,
refusals of newer schemas, and that no crash leaves half of one.
"""

from sqlite_utils import Migrations

from lorad.migrations import m0001_first_schema

MIGRATIONS = Migrations("lorad.schema")  # databases of before the first release have "lorad" or "lorad.store"
for _module in (m0001_first_schema,):
    MIGRATIONS(name=_module.__name__.rpartition(".")[2])(_module.apply)
