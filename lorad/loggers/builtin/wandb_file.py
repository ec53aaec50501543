"""Reads W&B's file of an offline run, to see that all of it is on disk: `finish()` returns before it is.

The file is a log of LevelDB's kind, behind a header of 7 bytes: blocks of 32 KiB, records cut into fragments.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER = 7  # bytes
_BLOCK = 32768  # bytes
_FRAGMENT = struct.Struct("<IHB")
_FULL = 1
_FIRST = 2
_LAST = 4


def records(path: Path) -> Iterator[Any]:
    """Yield the whole records of a file. A torn tail ends it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    place = _HEADER
    parts = b""
    while place + _FRAGMENT.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _FRAGMENT.size:
            place += left
            continue
        _, size, kind = _FRAGMENT.unpack_from(data, place)
        fragment = data[place + _FRAGMENT.size : place + _FRAGMENT.size + size]
        if kind == 0 or len(fragment) < size:
            return
        place += _FRAGMENT.size + size
        parts = fragment if kind in (_FULL, _FIRST) else parts + fragment
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record


def is_whole(path: Path, steps: int) -> bool:
    """Return whether a file has so many steps, and the end of its run."""
    kinds = [record.WhichOneof("record_type") for record in records(path)]
    return kinds.count("history") >= steps and "exit" in kinds
