"""Keys of loggers: files with one line, which only their owner may read. Nothing else of lorad reads them."""

import os
import stat
from pathlib import Path

from lorad.errors import SpecError
from lorad.files import expanded, read_file

_BYTES = 4096


def whole(path: str) -> Path:
    """Make the path that a setting means. Raises SpecError for a relative one: who follows runs is in no
    directory of theirs."""
    place = expanded(path)
    if not place.is_absolute():
        raise SpecError(f"{path} is a relative path", hint="Write all of it, from / or ~ on.")
    return place


def read_key(path: str) -> str:
    """Read a key. Raises SpecError, whose message does not contain the key."""
    place = expanded(path)
    advice = f"It holds the key alone: chmod 600 {place}."
    try:
        there = place.stat()
        if there.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SpecError(f"{place} is readable by others (mode {there.st_mode & 0o777:04o})", hint=advice)
        if there.st_uid not in (os.getuid(), 0):
            raise SpecError(f"{place} belongs to user {there.st_uid}", hint=advice)
        key = read_file(place, _BYTES).decode().strip()
    except OSError as error:
        raise SpecError(f"{place}: {error.strerror}", hint=advice) from None
    except UnicodeDecodeError:
        raise SpecError(f"{place} holds no text", hint=advice) from None
    if not key or len(key.split()) != 1:
        raise SpecError(f"{place} holds no key", hint=advice)
    return key
