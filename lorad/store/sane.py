"""Reject what no driver of lorad writes into a journal, which may belong to another user than the daemon."""

from __future__ import annotations

import math
import re
from typing import Any

from lorad.errors import IntegrityError
from lorad.protocol.journal import Record

PATHS = {
    "version": ("path", "versions"),
    "checkpoint": ("path", "checkpoints"),
    "step": ("samples", "samples"),
}
NUMBERS = ("version", "parent", "rank", "bytes", "problems", "failed", "position", "to", "resumed_from")
WORDS = ("sha256", "samples_sha256", "attested", "attestation", "reason", "score", "alpha")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
MOST_STEPS, MOST_ATTEMPTS, MOST = 10**12, 10**6, 2**53
LATEST = 4.0e9  # Unix seconds


def refuse_strange(run: str, record: Record) -> None:
    """Paths lie in the run's own directories, one step below; numbers are such as files and rows are named
    by.

    Raises IntegrityError, which names the record.
    """
    if wrong := strange(record):
        raise IntegrityError(
            f"record {record.seq} of the journal of run {run}: {wrong}",
            hint="No driver of lorad writes that: somebody else did. Nothing of it was taken in.",
        )


def strange(record: Record) -> str:
    """Say what is wrong with a record; "" when nothing is."""
    places = (
        ("step", record.step, MOST_STEPS),
        ("attempt", record.attempt, MOST_ATTEMPTS),
        ("seq", record.seq, MOST),
    )
    for name, number, most in places:
        if not 0 <= number <= most:
            return f"its {name} is {number}"
    if not (math.isfinite(record.at) and 0 <= record.at <= LATEST):
        return f"its time is {record.at}"
    if record.kind in PATHS:
        key, directory = PATHS[record.kind]
        if key in record.data and not is_below(record.data[key], directory):
            return f"{key} {str(record.data[key])[:200]!r} is not in {directory}/"
    if wrong := next((key for key in WORDS if isinstance(record.data.get(key), dict | list)), ""):
        return f"{wrong} is {str(record.data[wrong])[:80]!r}"
    return next(
        (f"{key} is {str(record.data[key])[:80]!r}" for key in NUMBERS if not fits(record.data.get(key))), ""
    )


def is_below(path: Any, directory: str) -> bool:
    if not isinstance(path, str):
        return False
    parent, _, name = path.partition("/")
    return parent == directory and NAME.fullmatch(name) is not None


def fits(number: Any) -> bool:
    return number is None or (isinstance(number, int) and -1 <= number <= MOST)
