"""The files that an attempt read beside the weights, and whether they have changed."""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from lorad.files import open_file

HASHED_BYTES = 1 << 30  # of data that are hashed as a whole, which takes a second or two


class RowCounts(Struct, frozen=True):
    """Says what the rows of an attempt are, as far as they were looked at.

    rows: how many the training data have; 0 for data that never end.
    distinct: how many of them differ, by prompt and completions.
    held_out: how many problems data.eval has.
    seen: how many of those are among the rows that are trained on.
    template: whether the model's chat template writes the prompts: applied, unused, or none without one.
    """

    rows: int = 0
    distinct: int = 0
    held_out: int = 0
    seen: int = 0
    template: str = ""


class Input(Struct, frozen=True):
    """A file that an attempt read; or packages with their versions, which have neither size nor time.

    mtime: in nanoseconds.
    sha256: digest of its bytes; "" for data that are large.
    """

    path: str
    bytes: int
    mtime: int
    sha256: str = ""


def look(path: Path, *, at_most: float = math.inf) -> Input:
    """Look at a file, and read it for its digest where it has `at_most` bytes. Raises OSError."""
    with open_file(path) as file:
        stat = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest() if stat.st_size <= at_most else ""
    return Input(str(path), stat.st_size, stat.st_mtime_ns, digest)


def changes(before: Mapping[str, Input]) -> list[str]:
    """List the files that changed since `before`, a sentence each."""
    changed = []
    for key, old in before.items():
        if not (old.bytes or old.mtime):
            continue
        try:
            now = look(Path(old.path), at_most=-1)
            is_same = (now.bytes, now.mtime) == (old.bytes, old.mtime)
            if not is_same and old.sha256:
                is_same = look(Path(old.path)).sha256 == old.sha256
        except OSError as error:
            changed.append(f"{key}: {old.path} cannot be read any more: {error.strerror}")
            continue
        if not is_same:
            what = "is not what it was in" if old.sha256 else "was written to after the beginning of"
            changed.append(f"{key}: {old.path} {what} the attempt before")
    return changed
