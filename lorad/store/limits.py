"""How much of a record goes into the index: no run fails for a metric too many.

`sane.py` says what is refused.
"""

from __future__ import annotations

import math
import sqlite3
from typing import Any

import msgspec

from lorad.bounds import EVENT_BYTES, METRIC_NAME, METRICS, TEXT
from lorad.protocol.journal import Record
from lorad.store.facts import COLUMNS

OF_FACTS = {column for _, columns in COLUMNS.values() for column in columns}
KNOWN = {"metrics", "message", "reason", "detail", "hint", "to", "resumed_from", *OF_FACTS}
TOO_MUCH = f"of a record of more than {EVENT_BYTES} bytes, only what lorad knows is kept"
LEFT_OUT = (
    f"of the metrics of a step, only {METRICS} are kept, the first by name: numbers whose names have at most "
    f"{METRIC_NAME} characters"
)


def bounded(record: Record) -> tuple[Record, str]:
    """Shorten a record to what is ingested. Also returns what was left out; "" for nothing."""
    data = {key: _cut(value) for key, value in record.data.items()}
    told = ""
    if record.kind == "step" and "metrics" in data:
        data["metrics"], told = _metrics(record)
    if len(msgspec.json.encode({**data, "prompts": None})) > EVENT_BYTES:
        data, told = {key: value for key, value in data.items() if key in KNOWN}, TOO_MUCH
    return msgspec.structs.replace(record, data=data), told


def _cut(value: Any) -> Any:
    return value[:TEXT] + "…" if isinstance(value, str) and len(value) > TEXT else value


def _metrics(record: Record) -> tuple[dict[str, Any], str]:
    """Null stands for a number that is not finite, as JSON has none."""
    metrics = record.data.get("metrics")
    if not isinstance(metrics, dict):
        return {}, LEFT_OUT
    sound = {name: value for name, value in metrics.items() if len(name) <= METRIC_NAME and _is_number(value)}
    kept = {name: sound[name] for name in sorted(sound)[:METRICS]} if len(sound) > METRICS else sound
    return kept, LEFT_OUT if len(kept) < len(metrics) else ""


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return value is None or (isinstance(value, float) and math.isfinite(value))


def is_told(connection: sqlite3.Connection, run: str, message: str) -> bool:
    """Check whether the run has an event with this warning."""
    sql = "SELECT 1 FROM events WHERE run = ? AND kind = 'warning' AND json_extract(data, '$.message') = ?"
    return connection.execute(sql, (run, message)).fetchone() is not None
