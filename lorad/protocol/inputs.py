"""Files that an attempt read beside the weights: what they were then, and whether they have changed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

_CHUNK = 1 << 20


class Input(Struct, frozen=True):
    """A file that an attempt read.

    bytes: its size.
    mtime: in nanoseconds.
    sha256: of its bytes; "" for data, whose rows have a digest of their own.
    """

    path: str
    bytes: int
    mtime: int
    sha256: str = ""


def look(path: Path, *, hashed: bool = True) -> Input:
    """Raises OSError."""
    with path.open("rb") as file:
        there, digest = path.stat(), hashlib.sha256()
        while hashed and (data := file.read(_CHUNK)):
            digest.update(data)
    return Input(str(path), there.st_size, there.st_mtime_ns, digest.hexdigest() if hashed else "")


def changes(before: Mapping[str, Input]) -> list[str]:
    """List the files that changed since `before`, a sentence each."""
    found = []
    for key, old in before.items():
        try:
            now = look(Path(old.path), hashed=False)
            is_same = (now.bytes, now.mtime) == (old.bytes, old.mtime)
            if not is_same and old.sha256:
                is_same = look(Path(old.path)).sha256 == old.sha256
        except OSError as error:
            found.append(f"{key}: {old.path} cannot be read any more: {error.strerror}")
            continue
        if not is_same:
            what = "is not what it was in" if old.sha256 else "was written to after the beginning of"
            found.append(f"{key}: {old.path} {what} the attempt before")
    return found
