"""A frame is a prefix, a msgpack header and raw array buffers: no pickle, no copy beyond the socket's.

    u32 header bytes | u32 buffer count | u64 body bytes | body        (little endian)
    body: u64 bytes of each buffer | header | buffers, each with zeros before it up to a multiple of 8 bytes

Arrays in a header are replaced by an extension (dtype, shape, buffer index), paths by their text.
"""

import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

PREFIX = struct.Struct("<IIQ")
_ALIGNMENT = 8  # bytes, so that arrays can be used where they lie
_ARRAY = 1  # msgpack extension code of an array
_MAX_HEADER = 64 << 20
_MAX_BUFFERS = 1 << 20  # two for each prompt of a call
MAX_BODY = 8 << 30
JOIN_BELOW = 64 << 10  # bytes; the parts of a small frame are one
_KNOWN = ("float32", "float16", "int32", "int64", "uint64", "uint8", "uint16", "bool")
DTYPES = {name: np.dtype(name) for name in _KNOWN}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BadFrame(Exception):
    """The peer does not speak this protocol; the connection is of no further use."""


class _Prefix(NamedTuple):
    """The sizes of a frame, which stand before its body."""

    header: int
    buffers: int
    body: int


def converted(plain: Any, kind: type[T]) -> T:
    """Convert a decoded body to a Struct; arrays in it stay as they are. Raises ValidationError."""

    def hook(expected: Any, value: Any) -> Any:
        if isinstance(value, expected):
            return value
        raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")

    return msgspec.convert(plain, kind, dec_hook=hook)


def encode(message: Any) -> list[bytes | memoryview]:
    """List the parts of one frame, to be written in order; a small frame is one part."""
    buffers: list[memoryview] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype in _NAMES:
            name = _NAMES[value.dtype]
            index = len(buffers)
            buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((name, value.shape, index)))
        if isinstance(value, Path):
            return str(value)
        raise TypeError(f"{type(value).__name__} cannot travel in a frame")

    header = msgspec.msgpack.encode(message, enc_hook=hook)
    sizes = [len(buffer) for buffer in buffers]
    spans = list(_spans(8 * len(sizes) + len(header), sizes))
    end = 8 * len(sizes) + len(header)
    parts: list[bytes | memoryview] = [
        PREFIX.pack(len(header), len(sizes), spans[-1][1] if spans else end),
        struct.pack(f"<{len(sizes)}Q", *sizes),
        header,
    ]
    for (start, stop), buffer in zip(spans, buffers, strict=True):
        parts += [bytes(start - end), buffer]
        end = stop
    return [b"".join(parts)] if end < JOIN_BELOW else [part for part in parts if len(part)]


def read(recv_into: Callable[[memoryview], int], kind: type[T], most: int = MAX_BODY) -> T:
    """Read the message of one frame of at most `most` bytes from a blocking source.

    recv_into: reads some bytes into a buffer; 0 at the end.

    Raises BadFrame, and ConnectionResetError when the source ends first.
    """
    prefix = parse_prefix(exactly(recv_into, PREFIX.size))
    if prefix.body > most:
        raise BadFrame(f"a frame of {prefix.body} bytes, where {most} are a lot")
    return decode(prefix, exactly(recv_into, prefix.body), kind)


async def read_async(recv_into: Callable[[memoryview], Awaitable[int]], kind: type[T]) -> T:
    """Read the message of one frame from a source that is awaited; raises what `read` raises."""
    prefix = parse_prefix(await _exactly_async(recv_into, PREFIX.size))
    return decode(prefix, await _exactly_async(recv_into, prefix.body), kind)


def exactly(recv_into: Callable[[memoryview], int], size: int) -> bytearray:
    """Read so many bytes from a blocking source. Raises ConnectionResetError when it ends first."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = recv_into(rest)
        if not count:
            raise ConnectionResetError("connection closed")
        rest = rest[count:]
    return data


async def _exactly_async(recv_into: Callable[[memoryview], Awaitable[int]], size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = await recv_into(rest)
        if not count:
            raise ConnectionResetError("connection closed")
        rest = rest[count:]
    return data


def parse_prefix(data: bytes | bytearray) -> _Prefix:
    """Decode a prefix. Raises BadFrame on sizes that no peer of ours sends."""
    prefix = _Prefix(*PREFIX.unpack(data))
    if prefix.header > _MAX_HEADER or prefix.buffers > _MAX_BUFFERS or prefix.body > MAX_BODY:
        raise BadFrame(
            f"a header of {prefix.header} bytes with {prefix.buffers} buffers in {prefix.body} bytes"
        )
    return prefix


def decode(prefix: _Prefix, body: bytes | bytearray, kind: type[T]) -> T:
    """Decode a frame's message, whose arrays are views of `body`. Raises BadFrame when it is no `kind`."""
    view = memoryview(body)
    start = 8 * prefix.buffers
    end = start + prefix.header
    if end > len(body):
        raise BadFrame(f"a body of {len(body)} bytes is too short for its header")
    buffers = list(_spans(end, struct.unpack_from(f"<{prefix.buffers}Q", body)))
    if len(body) != (buffers[-1][1] if buffers else end):
        raise BadFrame(f"a body of {len(body)} bytes does not hold its buffers exactly")

    def array(code: int, data: memoryview) -> Any:
        if code != _ARRAY:
            raise BadFrame(f"extension {code}")
        name, shape, index = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], int])
        if name not in DTYPES or not 0 <= index < len(buffers) or min(shape, default=0) < 0:
            raise BadFrame(f"array of {name} {shape} in buffer {index}")
        start, stop = buffers[index]
        return np.frombuffer(view[start:stop], DTYPES[name]).reshape(shape)

    def custom(expected: Any, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value
        if expected is Path and isinstance(value, str):
            return Path(value)
        raise BadFrame(f"expected an array, got {type(value).__name__}")

    try:
        return msgspec.msgpack.decode(view[start:end], type=kind, ext_hook=array, dec_hook=custom)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise BadFrame(str(error)) from error


def _spans(end: int, sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield where buffers of these sizes begin and end, one after another behind `end`."""
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + size
        yield start, end
