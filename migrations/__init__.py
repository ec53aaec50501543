"""The schema of the store, one migration per change. A migration that was released never changes."""

from sqlite_utils import Migrations

from lorad.migrations import (
    m0001_first_schema,
    m0002_held_out_likelihood,
    m0003_eval_sets,
    m0004_token_accuracy,
    m0005_bill,
    m0006_tags_notes_groups,
    m0007_reservations,
    m0008_forecasts,
    m0009_renames,
    m0010_nodes,
)

MIGRATIONS = Migrations("lorad.store")  # databases of before the first release have those of a set "lorad"
for _module in (
    m0001_first_schema,
    m0002_held_out_likelihood,
    m0003_eval_sets,
    m0004_token_accuracy,
    m0005_bill,
    m0006_tags_notes_groups,
    m0007_reservations,
    m0008_forecasts,
    m0009_renames,
    m0010_nodes,
):
    MIGRATIONS(name=_module.__name__.rpartition(".")[2])(_module.apply)
