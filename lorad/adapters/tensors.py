"""Writes files of safetensors, and reads others', checking every claim of the header.

Format: 8 bytes little-endian header length, JSON header, data; see the safetensors project's README. Unlike
`safetensors.numpy`, this reads bfloat16.
"""

import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lorad.bounds import ADAPTER_BYTES, ADAPTER_HEADER
from lorad.errors import AdapterRefused
from lorad.files import open_file, refuse_sparse

_DIMENSIONS = 8
_SLICE = 1 << 22  # values of two tensors that are compared at a time
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# numpy has no bfloat16: see `bfloat16_bits`
_NAMES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<u2": "BF16"}
_ALIGNMENT = 8  # bytes; the data begins at a multiple
_NOT_AN_ADAPTER = "an adapter is small beside its base: is it a whole model?"
_DAMAGED = "the file is damaged or incomplete: copy or export it again"


def serialized(tensors: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """Return the parts of a file, byte for byte as `safetensors.numpy.save` makes it, without a copy."""
    header, names = _header(tuple((name, tensor.dtype.str, tensor.shape) for name, tensor in tensors.items()))
    return [header, *(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data for name in names)]


@lru_cache
def _header(layout: tuple[tuple[str, str, tuple[int, ...]], ...]) -> tuple[bytes, list[str]]:
    """Return the header of tensors by name, dtype and shape, and the names in the order of their data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in sorted(layout, key=lambda entry: (-np.dtype(entry[1]).itemsize, entry[0])):
        start = end
        end += math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, list(header)[1:]


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """Round a float32 array to the nearest bfloat16, ties to even, as torch does; return the bits, uint16."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


class _Entry(NamedTuple):
    """A tensor by the header; its bytes in the file are from `start` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read every tensor's shape from the header, checked against the file's size. Raises AdapterRefused."""
    with _opened(path) as (_, entries):
        return {name: entry.shape for name, entry in entries.items()}


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return all tensors of `path`, or those in `names`, as fp32 arrays that cannot be written to.

    Nothing but the header is read before all its claims fit the file. Raises AdapterRefused, which names the
    file and the tensor.
    """
    with _opened(path) as (file, entries):
        chosen = {name: entry for name, entry in entries.items() if names is None or name in names}
        return {name: _array(file, entry, path, name) for name, entry in chosen.items()}


def find_tensor(paths: Iterable[Path], name: str) -> Path | None:
    """Return the file of a base that has the tensor `name`. Raises AdapterRefused and OSError."""
    for path in paths:
        with open_file(path) as file:
            if name in _read_header(file, os.fstat(file.fileno()).st_size, path):
                return path
    return None


def same_values(path: Path, name: str, base: Path, base_name: str) -> bool:
    """Return whether the tensor `name` of an adapter's file is, in fp32, `base_name` in a file of its base.

    Little of both is in memory at a time. Raises AdapterRefused and OSError.
    """
    with _opened(path) as (file, entries), open_file(base) as other:
        header = _read_header(other, os.fstat(other.fileno()).st_size, base)
        entry = entries[name]
        start = other.tell()
        low, high = _span(header[base_name], base, base_name)
        theirs = header[base_name]
        if entry.shape != tuple(theirs["shape"]):
            return False
        in_other = _Entry(theirs["dtype"], entry.shape, start + low, start + high)
        for first in range(0, math.prod(entry.shape), _SLICE):
            pieces = (_slice(file, entry, first, path, name), _slice(other, in_other, first, base, base_name))
            if not np.array_equal(*pieces, equal_nan=True):
                return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, dict[str, _Entry]]]:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > ADAPTER_BYTES:
                raise AdapterRefused(
                    f"{path}: {size} bytes are more than {ADAPTER_BYTES}", hint=_NOT_AN_ADAPTER
                )
            refuse_sparse(file, path)
            header = _read_header(file, size, path)
            spans = {
                name: _span(entry, path, name) for name, entry in header.items() if name != "__metadata__"
            }
            begin = file.tell()
            # the tensors fill the data exactly: no hole, no overlap, nothing behind
            position = 0
            for start, end in sorted(spans.values()):
                if start != position:
                    raise AdapterRefused(
                        f"{path}: its tensors overlap or leave a hole at byte {position}", hint=_DAMAGED
                    )
                position = end
            if position != size - begin:
                raise AdapterRefused(
                    f"{path}: its tensors take {position} bytes but it has {size - begin}", hint=_DAMAGED
                )
            entries = {
                name: _Entry(header[name]["dtype"], tuple(header[name]["shape"]), begin + start, begin + end)
                for name, (start, end) in spans.items()
            }
            yield file, entries
    except OSError as error:
        raise AdapterRefused(
            f"{path}: not readable: {error.strerror}", hint="check the path and its mode"
        ) from error


def _slice(file: BinaryIO, entry: _Entry, first: int, path: Path, name: str) -> np.ndarray:
    """Return `_SLICE` values from number `first` on, or as many as are left."""
    count = min(_SLICE, math.prod(entry.shape) - first)
    size = _ITEM_BYTES[entry.dtype]
    start = entry.start + first * size
    part = _Entry(entry.dtype, (count,), start, start + count * size)
    return _array(file, part, path, name)


def _read_header(file: BinaryIO, size: int, path: Path) -> dict[str, Any]:
    if size < 8:
        raise AdapterRefused(f"{path}: {size} bytes are no safetensors file", hint=_DAMAGED)
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(ADAPTER_HEADER, size - 8):
        raise AdapterRefused(f"{path}: its header claims {length} bytes of {size}", hint=_DAMAGED)
    text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique) if text.startswith(b"{") else None
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{path}: its header is not JSON: {error}", hint=_DAMAGED) from error
    if not isinstance(header, dict):
        raise AdapterRefused(f"{path}: its header is no JSON object", hint=_DAMAGED)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name is there twice")
    return values


def _span(entry: Any, path: Path, name: str) -> tuple[int, int]:
    """Return where one tensor's bytes start and end, equal to what its shape and dtype need."""
    try:
        dtype = entry["dtype"]
        shape = entry["shape"]
        start, end = entry["data_offsets"]
        sound = len(shape) <= _DIMENSIONS and all(
            type(n) is int and 0 <= n < 2**63 for n in (*shape, start, end)
        )
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise AdapterRefused(f"{path}: the header's entry of {name} is malformed", hint=_DAMAGED)
    if dtype not in _ITEM_BYTES:
        raise AdapterRefused(
            f"{path}: {name} is {dtype}", hint=f"save the adapter as one of {', '.join(_ITEM_BYTES)}"
        )
    if end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise AdapterRefused(
            f"{path}: {name} has {end - start} bytes for shape {shape} of {dtype}", hint=_DAMAGED
        )
    return start, end


def _array(file: BinaryIO, entry: _Entry, path: Path, name: str) -> np.ndarray:
    file.seek(entry.start)
    data = file.read(entry.end - entry.start)
    if len(data) != entry.end - entry.start:
        raise AdapterRefused(f"{path}: {name} was cut while it was read", hint=_DAMAGED)
    if entry.dtype == "BF16":  # the upper half of a float32
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        values = bits.view(np.float32)
    else:
        values = np.frombuffer(data, "<f4" if entry.dtype == "F32" else "<f2")
        values = np.require(values, np.float32, "A")
    values.flags.writeable = False
    return values.reshape(entry.shape)
