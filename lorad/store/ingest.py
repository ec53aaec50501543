"""Ingest a run's journal: every fact exactly once, in the order of the journal, some records at a time.

Rows and the place up to which the journal was read commit together. When the last record read is no longer
where it was (the journal was cut: only a record that was never fsynced can go), the journal is read again
from its start: facts replace their own rows, rows whose record is gone no longer count, and only records
never seen before are new.
"""

import sqlite3
from itertools import islice
from pathlib import Path

from msgspec import Struct, structs

from lorad.errors import IntegrityError
from lorad.protocol.journal import Place, Record, read, read_on
from lorad.store import events, facts, runs
from lorad.store.db import Store, put_row
from lorad.store.events import names
from lorad.store.facts import bounded

# What is taken in at once: requests to the daemon wait for so long.
PORTION = 200  # records
PORTION_BYTES = 1 << 20

_WARNED = "SELECT 1 FROM events WHERE run = ? AND kind = 'warning' AND json_extract(data, '$.message') = ?"

Portion = list[tuple[Record, int]]  # records, each with the offset after it


class Ingested(Place, frozen=True):
    """How far a journal was read.

    told_seq, told_crc: while the journal is read again, the last record that had its event before; else 0.
    """

    told_seq: int = 0
    told_crc: int = 0

    @property
    def last_with_event(self) -> tuple[int, int]:
        """Number and checksum of the last record that has its event."""
        return max((self.seq, self.crc), (self.told_seq, self.told_crc), key=lambda last: last[0])


class IngestedPortion(Struct, frozen=True):
    """What one call of `ingest_some` ingested.

    new: records that were never seen before.
    more: whether there is more to ingest.
    is_again: whether the journal is read again from its start.
    offset: bytes of the journal that were read.
    """

    new: list[Record]
    more: bool
    is_again: bool
    offset: int


def ingest(store: Store, run_name: str, journal: Path) -> list[Record]:
    """Ingest everything that is new in the journal of a run, and return the records.

    Raises what `ingest_some` raises; what was ingested before that stays.
    """
    new: list[Record] = []
    while True:
        taken = ingest_some(store, run_name, journal)
        new += taken.new
        if not taken.more:
            return new


def ingest_some(store: Store, run_name: str, journal: Path) -> IngestedPortion:
    """Take in a portion of what is new in the journal of a run. A missing journal has nothing new.

    Raises NotFound for an unknown run, IntegrityError for a whole record that no driver of this lorad writes
    or that another run wrote, and OSError; then nothing of the portion was taken in.
    """
    runs.get(store, run_name)
    place = _place(store, run_name)
    nothing = IngestedPortion([], False, False, place.offset)
    if not journal.exists():
        return nothing
    continues, portion, more = _unread(journal, place)
    if continues and not portion and not place.told_seq:
        return nothing
    refuse_foreign_journal(store, run_name, journal, portion)
    if not continues:
        seq, crc = place.last_with_event
        place = Ingested(told_seq=seq, told_crc=crc)
    with store.write() as connection:
        for table in () if continues else facts.TABLES:  # a mark that `facts.put` clears again
            sql = f"UPDATE {table} SET seq = -seq, lineage = 0 WHERE run = ? AND seq > 0"
            connection.execute(sql, (run_name,))
        new = _take_in(connection, run_name, portion, place)
        if place.told_seq and not more:
            # rows that still bear the mark are in no journal; versions stay, as an alias may name them
            for table in {*facts.TABLES} - {"versions"}:
                connection.execute(f"DELETE FROM {table} WHERE run = ? AND seq < 0", (run_name,))
        facts.summarize(store, connection, run_name)
        place = place_after(portion, place, more=more)
        put_row(connection, "journal_offsets", {"run": run_name} | structs.asdict(place))
    return IngestedPortion(new, more, not continues, place.offset)


def is_of_run(store: Store, run: str, journal: Path) -> bool:
    """Check whether a journal has what was ingested last of `run`, if anything was. Raises OSError."""
    place = _place(store, run)
    return not place.seq or (journal.exists() and _unread(journal, place)[0])


def refuse_foreign_journal(store: Store, run: str, journal: Path, portion: Portion | None = None) -> None:
    """Raise IntegrityError where a portion of a journal, by default its first record, is of another run. The
    run's own may have its earlier names. Raises OSError, too.
    """
    records = islice(read(journal), 1) if portion is None else portion
    others = {record.run for record, _ in records} - {run}
    if others and (foreign := sorted(others - names(store, run))):
        raise IntegrityError(
            f"{journal} has records of run {foreign[0]}, none of which is taken in",
            hint=f"Put the journal of run {run} back, from a copy; until then it is not resumed.",
        )


def _place(store: Store, run: str) -> Ingested:
    columns = 'start, "offset", seq, crc, told_seq, told_crc'
    row = store.row(f"SELECT {columns} FROM journal_offsets WHERE run = ?", (run,))
    return Ingested(**row) if row else Ingested()


def _unread(journal: Path, place: Ingested) -> tuple[bool, Portion, bool]:
    """Read a portion of the records after `place`.

    Returns whether the journal still continues from `place` (else the portion is from its start), the
    portion, and whether more records follow.
    """
    following = read_on(journal, place)
    continues = following is not None
    portion: Portion = []
    for record in read(journal) if following is None else following:
        portion.append(record)
        if len(portion) == PORTION or portion[-1][1] - portion[0][1] >= PORTION_BYTES:
            return continues, portion, True
    return continues, portion, False


def _take_in(connection: sqlite3.Connection, run: str, portion: Portion, place: Ingested) -> list[Record]:
    """Put rows for the records after `place`, each seq once, and events for those that had none yet.

    Returns the records that got an event.
    """
    new = []
    after = place.seq
    for record, _ in portion:
        if record.seq <= after:
            continue
        after = record.seq
        record, left_out = bounded(record)
        try:
            facts.put(connection, run, record)
        except (KeyError, TypeError, OverflowError, sqlite3.IntegrityError) as error:
            raise IntegrityError(
                f"record {record.seq} of the journal of run {run} is not understood: {error!r}"
            ) from error
        seq, crc = place.last_with_event
        if record.seq > seq or (record.seq == seq and record.crc != crc):
            events.add(connection, run, record.kind, facts.event_data(record), at=record.at)
            if left_out and connection.execute(_WARNED, (run, left_out)).fetchone() is None:
                events.add(connection, run, "warning", {"message": left_out})
            new.append(record)
    return new


def place_after(portion: Portion, before: Ingested, *, more: bool = False) -> Ingested:
    """Return the place after a portion that follows `before`."""
    if portion:
        record, offset = portion[-1]
        start = portion[-2][1] if len(portion) > 1 else before.offset
        before = structs.replace(before, start=start, offset=offset, seq=record.seq, crc=record.crc)
    return before if more else structs.replace(before, told_seq=0, told_crc=0)
