"""From a run's journal into the index: every fact exactly once, in the order of the journal.

Rows and the place up to which the journal was read commit together. When the last record read is no longer where it
was (the journal was cut: only a record that was never fsynced can go), the journal is read again from its start: facts
replace their own rows, rows whose record is gone no longer count, and only records never seen before are new.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from msgspec import Struct

from lorad.errors import IntegrityError
from lorad.protocol.journal import Record, read
from lorad.store import events, facts, runs
from lorad.store.db import Store
from lorad.store.limits import bounded, is_told


class Place(Struct, frozen=True):
    """The last record that was read: its bytes, number and checksum; seq 0 before the first."""

    start: int = 0
    offset: int = 0
    seq: int = 0
    crc: int = 0


def ingest(store: Store, run_name: str, journal: Path) -> list[Record]:
    """Take in what is new in the journal of a run: the new records. A journal that is missing has nothing new.

    Raises NotFound (no such run), IntegrityError (a whole record that no driver of this lorad writes) and OSError; then
    nothing was taken in.
    """
    runs.get(store, run_name)
    place = _place(store, run_name)
    if not journal.exists() or journal.stat().st_size == place.offset:
        return []
    continues, found = _unread(journal, place)
    if continues and not found:
        return []
    with store.write() as connection:
        if not continues:
            facts.doubt(connection, run_name)
        new = _take_in(store, connection, run_name, found, place, after=place.seq if continues else 0)
        if not continues:
            facts.forget_doubted(connection, run_name)
        facts.summarize(store, connection, run_name)
        set_place(connection, run_name, found, place if continues else Place())
    return new


def _place(store: Store, run: str) -> Place:
    row = store.row('SELECT start, "offset", seq, crc FROM journal_offsets WHERE run = ?', (run,))
    return Place(**row) if row else Place()


def _unread(journal: Path, place: Place) -> tuple[bool, list[tuple[Record, int]]]:
    """Whether the journal goes on after `place`, and the records (with the offsets after them) to take in."""
    if place.seq:
        found = list(read(journal, place.start))
        if not found or (found[0][0].seq, found[0][0].crc) != (place.seq, place.crc):
            return False, list(read(journal))
        return True, found[1:]
    return True, list(read(journal))


def _take_in(
    store: Store,
    connection: sqlite3.Connection,
    run: str,
    found: list[tuple[Record, int]],
    place: Place,
    *,
    after: int,
) -> list[Record]:
    """Rows for the records with seq > `after`, each seq once; those that `place` had not seen get events."""
    new = []
    for record, _ in found:
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
        if record.seq > place.seq or (record.seq == place.seq and record.crc != place.crc):
            events.append(store, run, record.kind, facts.event_data(record), at=record.at)
            if left_out and not is_told(connection, run, left_out):
                events.append(store, run, "warning", {"message": left_out})
            new.append(record)
    return new


def set_place(connection: sqlite3.Connection, run: str, found: list[tuple[Record, int]], before: Place) -> None:
    start = found[-2][1] if len(found) > 1 else before.offset
    place = Place(start, found[-1][1], found[-1][0].seq, found[-1][0].crc) if found else before
    connection.execute(
        'INSERT INTO journal_offsets (run, start, "offset", seq, crc) VALUES (?, ?, ?, ?, ?) '
        "ON CONFLICT DO UPDATE SET start = excluded.start, offset = excluded.offset, seq = excluded.seq, "
        "crc = excluded.crc",
        (run, place.start, place.offset, place.seq, place.crc),
    )
