"""Journals are taken in as long as they are to be believed: that of another user's run is whatever that user wrote."""

from __future__ import annotations

import logging

from lorad.daemon.belongings import refuse_strange_journal
from lorad.daemon.context import Context, run_dir
from lorad.errors import IntegrityError
from lorad.protocol.journal import Record
from lorad.states import Move, RunState
from lorad.store import runs
from lorad.store.db import Row
from lorad.store.ingest import ingest

log = logging.getLogger("lorad.daemon")


def take_in(ctx: Context, run: Row) -> list[Record]:
    """What is new. Raises IntegrityError for what no driver of lorad writes; nothing after it is taken in."""
    refuse_strange_journal(run_dir(run), ctx.user(run["owner_uid"]))
    return ingest(ctx.store, run["name"], run_dir(run).journal)


def take_in_or_end(ctx: Context, run: Row) -> list[Record]:
    """A run that cannot be believed any more is killed: it would work on unseen. `settle` then says why."""
    try:
        return take_in(ctx, run)
    except IntegrityError as error:
        if run["wanted"] != "kill":
            log.error("run %s is ended: %s", run["name"], error.message)
            with ctx.store.write():
                if run["state"] != RunState.STOPPING:
                    ctx.move(run["name"], Move.STOP, detail=error.message)
                runs.set_fields(ctx.store, run["name"], wanted="kill")
        return []
