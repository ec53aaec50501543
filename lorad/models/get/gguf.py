"""Read GGUF files, in which llama.cpp keeps models: what they say of the model, and its tensors.

Format: `docs/gguf.md` of ggml. lorad knows the digest of each file that it reads, and does not check
what the file claims against its size.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # by the format's number of a type
_TEXT = 8
_LIST = 9
_ALIGNMENT = 32  # bytes; tensors begin at multiples, where `general.alignment` does not say another
_BLOCK = 32  # numbers that have a scale in common
_F32 = 0
_Q4_1 = 3
_Q8_0 = 8
_BLOCKS = {
    _F32: np.dtype("<f4"),
    _Q4_1: np.dtype([("scale", "<f2"), ("least", "<f2"), ("halves", "u1", _BLOCK // 2)]),
    _Q8_0: np.dtype([("scale", "<f2"), ("values", "i1", _BLOCK)]),
}


class _TensorPlace(NamedTuple):
    """Where a tensor lies. The last dimension is the contiguous one, as in numpy."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class Gguf:
    """Reads one file.

    Attributes:
        facts: The keys and values of the file, `general.architecture` and so on.
        names: The names of its tensors.
    """

    def __init__(self, path: Path) -> None:
        """Open a file. Raises ValueError for what is no GGUF file of version 2 or 3."""
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        magic, version = self._numbers("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path} is no GGUF file of version 2 or 3")
        tensors, facts = self._numbers("QQ")
        self.facts = {self._text(): self._value(*self._numbers("I")) for _ in range(facts)}
        self._places = dict[str, _TensorPlace]()
        for _ in range(tensors):
            name = self._text()
            (dimensions,) = self._numbers("I")
            shape = self._numbers("Q" * dimensions)[::-1]
            self._places[name] = _TensorPlace(shape, *self._numbers("IQ"))
        self.names = list(self._places)
        alignment = self.facts.get("general.alignment", _ALIGNMENT)
        self._begin = -(-self._at // alignment) * alignment

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor in fp32. Raises ValueError for a type of blocks that lorad does not read."""
        shape, kind, offset = self._places[name]
        if kind not in _BLOCKS:
            raise ValueError(f"{name} is of type {kind}, and lorad reads F32, Q4_1 and Q8_0")
        block = _BLOCKS[kind]
        count = math.prod(shape) // (1 if kind == _F32 else _BLOCK)
        blocks: np.ndarray = np.frombuffer(self._data, block, count, self._begin + offset)
        if kind == _F32:
            return blocks.reshape(shape)
        scale: np.ndarray = blocks["scale"].astype(np.float32)[:, None]
        if kind == _Q8_0:
            return np.asarray(scale * blocks["values"]).reshape(shape)
        halves = blocks["halves"]  # the low four bits of all bytes are the first half of the block
        values = np.concatenate([halves & 15, halves >> 4], axis=1)
        return np.asarray(scale * values + blocks["least"].astype(np.float32)[:, None]).reshape(shape)

    def _numbers(self, form: str) -> tuple[Any, ...]:
        numbers = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return numbers

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _LIST:
            inner, count = self._numbers("IQ")
            return [self._value(inner) for _ in range(count)]
        return self._numbers(_NUMBERS[kind])[0]
