"""One frame: a fixed prefix, a msgpack header, raw array buffers. No pickle, no copies of arrays beyond the socket's.

    u32 header bytes | u32 buffer count | u64 bytes of each buffer | header | buffers        (little endian)

Arrays in a header are replaced by an extension (dtype, shape, buffer index).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

PREFIX = struct.Struct("<II")
ARRAY = 1  # msgpack extension code of an array
MAX_HEADER = 64 << 20
MAX_BUFFERS = 1 << 20  # two for each prompt of a call
MAX_BODY = 8 << 30
DTYPES = frozenset({"float32", "float16", "int32", "int64", "uint64", "uint8", "uint16", "bool"})


class BadFrame(Exception):
    """The peer does not speak this protocol; the connection is of no further use."""


def encode(message: Any) -> list[bytes | memoryview]:
    """The parts of one frame, to be written in order."""
    buffers: list[memoryview] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
            buffers.append(array.reshape(-1).view(np.uint8).data)
            return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode((str(array.dtype), value.shape, len(buffers) - 1)))
        raise TypeError(f"{type(value).__name__} cannot travel in a frame")

    header = msgspec.msgpack.encode(message, enc_hook=hook)
    sizes = struct.pack(f"<{len(buffers)}Q", *(len(b) for b in buffers))
    return [PREFIX.pack(len(header), len(buffers)) + sizes + header, *buffers]


def read(recv_exactly: Callable[[int], bytearray]) -> tuple[bytearray, list[bytearray]]:
    """One frame from a blocking source; raises BadFrame on sizes that no peer of ours sends."""
    header_size, count = parse_prefix(recv_exactly(PREFIX.size))
    sizes = parse_sizes(recv_exactly(8 * count), count)
    header = recv_exactly(header_size)
    return header, [recv_exactly(size) for size in sizes]


def parse_prefix(data: bytes | bytearray) -> tuple[int, int]:
    header_size, count = PREFIX.unpack(data)
    if header_size > MAX_HEADER or count > MAX_BUFFERS:
        raise BadFrame(f"a header of {header_size} bytes with {count} buffers")
    return header_size, count


def parse_sizes(data: bytes | bytearray, count: int) -> tuple[int, ...]:
    sizes = struct.unpack(f"<{count}Q", data)
    if sum(sizes) > MAX_BODY:
        raise BadFrame(f"a body of {sum(sizes)} bytes")
    return sizes


def decode(header: bytes | bytearray, buffers: list[bytearray], kind: type[T]) -> T:
    """The message of a frame, checked against `kind`; raises BadFrame when it does not fit."""

    def array(code: int, data: memoryview) -> Any:
        if code != ARRAY:
            raise BadFrame(f"extension {code}")
        name, shape, index = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], int])
        if name not in DTYPES or not 0 <= index < len(buffers) or min(shape, default=0) < 0:
            raise BadFrame(f"array of {name} {shape} in buffer {index}")
        return np.frombuffer(buffers[index], dtype=name).reshape(shape)

    def custom(expected: Any, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value
        raise BadFrame(f"expected an array, got {type(value).__name__}")

    try:
        return msgspec.msgpack.decode(header, type=kind, ext_hook=array, dec_hook=custom)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise BadFrame(str(error)) from error
