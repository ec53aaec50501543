"""Read the journals of runs: ingest them as far as they can be trusted, and find what an attempt wrote last.

The journal of another user may contain anything.
"""

import logging
from pathlib import Path

import msgspec

from lorad.daemon.context import Context
from lorad.daemon.guarded import each, of_run
from lorad.daemon.process.user_files import refuse_strange_journal
from lorad.errors import IntegrityError
from lorad.files import open_file
from lorad.protocol.journal import EndFact, Record, decode
from lorad.states import Move, RunState
from lorad.store import runs
from lorad.store.ingest import IngestedPortion, ingest_some, refuse_foreign_journal
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")

_TAIL = 1 << 18  # bytes of a journal in which an attempt's newest records are looked for
_LOOK_SECONDS = 0.1  # in one pass
MOST_CUTS = 3  # of the journal of one attempt; a crash of the machine or a full disk cuts a record, once


def take_in(ctx: Context, run: RunRow) -> IngestedPortion:
    """Ingest a part of the new records. Raises IntegrityError for one that no driver of lorad writes."""
    refuse_strange_journal(run.dir, ctx.user(run.owner_uid))
    taken = ingest_some(ctx.store, run.name, run.dir.journal)
    if taken.is_again:
        ctx.storage.cuts[run.name, run.attempt] += 1
        if ctx.storage.cuts[run.name, run.attempt] > MOST_CUTS:
            raise IntegrityError(f"the journal of run {run.name} keeps being rewritten")
    if taken.more:
        ctx.loop.poke()
    return taken


def refuse_journal(ctx: Context, run: RunRow) -> None:
    """Raise IntegrityError for a journal that is not the run's own, which `watch_journals` looks at again."""
    ctx.storage.doubted.add(run.name)
    refuse_strange_journal(run.dir, ctx.user(run.owner_uid))
    refuse_foreign_journal(ctx.store, run.name, run.dir.journal)
    ctx.storage.doubted.discard(run.name)


def watch_journals(ctx: Context) -> None:
    """Look at the journals that are doubted: at the start all, and later those that were refused."""
    doubted = runs.named(ctx.store, sorted(ctx.storage.doubted)) if ctx.storage.doubted else []
    each(ctx, refuse_journal, doubted, of_run, seconds=_LOOK_SECONDS)
    ctx.storage.doubted &= {run.name for run in doubted}


def take_in_or_end(ctx: Context, run: RunRow) -> list[Record]:
    """Ingest a run's journal; kill the run if it cannot be trusted, as it would go on unseen."""
    try:
        return take_in(ctx, run).new
    except IntegrityError as error:
        if run.wanted != "kill":
            log.error("run %s is ended: %s", run.name, error.message)
            with ctx.store.write():
                if run.state != RunState.STOPPING:
                    runs.move(ctx.store, run.name, Move.STOP, detail=error.message)
                runs.set_fields(ctx.store, run.name, wanted="kill")
        return []


def is_taken_in(ctx: Context, run: RunRow) -> bool:
    """Check whether all is ingested that the journal had when its driver was first seen to be gone."""
    size = ctx.storage.last_words.setdefault(run.name, size_of(run.dir.journal))
    taken = take_in(ctx, run)
    return not taken.more or taken.offset >= size


def size_of(journal: Path) -> int:
    try:
        return journal.stat().st_size
    except OSError:
        return 0


def last_facts(journal: Path, attempt: int) -> list[Record]:
    """List the records of an attempt that are in the tail of the journal."""
    try:
        with open_file(journal) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return []
    records = map(decode, lines)
    return [record for record in records if record is not None and record.attempt == attempt]


def end_of(facts: list[Record]) -> EndFact | None:
    """Find what the attempt recorded of its end; None when it recorded nothing."""
    ends = [fact for fact in facts if fact.kind == "end"]
    try:
        return msgspec.convert(ends[-1].data, EndFact) if ends else None
    except msgspec.ValidationError as error:  # user code may write there, too
        return EndFact("failed", f"the driver's last record is not understood: {error}")
