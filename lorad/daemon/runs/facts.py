"""What the end of a run's journal says of its present attempt, without reading the rest."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lorad.files import open_file
from lorad.protocol.journal import EndFact, Record, decode

TAIL = 1 << 18  # bytes


def last_facts(journal: Path, attempt: int) -> list[Record]:
    """List the newest records of an attempt, as many as are in the tail of the journal."""
    try:
        with open_file(journal) as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return []
    records = [decode(line) for line in lines if line.endswith(b"\n")]
    return [record for record in records if record is not None and record.attempt == attempt]


def end_of(facts: list[Record]) -> EndFact | None:
    """Find what the attempt recorded of its end; None when it recorded nothing."""
    ends = [fact for fact in facts if fact.kind == "end"]
    try:
        return msgspec.convert(ends[-1].data, EndFact) if ends else None
    except msgspec.ValidationError as error:  # user code may write there, too
        return EndFact("failed", f"the driver's last record is not understood: {error}")
