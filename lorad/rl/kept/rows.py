"""Rows as the model gets them: few in memory, many in a file, of which a number says where each is.

A file is records, one of each row and one of each sample of it, then the index, then a footer. A record is
its length and its crc32, 4 bytes each, and msgpack. What msgpack cannot give back as it was (a date, a
Decimal, an image) stays in memory, and such rows are in no file that another process opens.
"""

import os
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from lorad.errors import IntegrityError
from lorad.files import open_file
from lorad.rl.sources import Row
from lorad.spec.data import DataFormat

_IN_MEMORY = 8 << 20  # bytes; what takes less is quickly made again
_AT_ONCE = 1 << 20  # bytes that are written
_HEAD = 8  # bytes before a record
_END = 16  # bytes of the end of a file: the length of the footer, and MAGIC
_MAGIC = b"lorad/r1"


class Target(Struct, frozen=True, eq=False):
    """A completion in the data: its tokens, int32 [t], and which of them are trained, bool [t]."""

    tokens: np.ndarray
    trained: np.ndarray


class Kept(Struct, frozen=True, eq=False):
    """A row that is trained on, or a turn of one, by its name, with the tokens of its text, int32."""

    row: Row
    name: str
    text: str
    prompt: np.ndarray
    targets: tuple[Target, ...] = ()


class RowFacts(Struct, frozen=True):
    """The facts that follow from rows once they are ready, see `Dataset` and `TargetDataset`.

    lengths: The lengths of all prompts, uint32.
    """

    has_answers: bool
    digest: str
    dropped: int
    cut: int
    unshown: dict[tuple[str, int], str]
    lengths: bytes = b""
    form: DataFormat = "auto"
    split: int = 0
    unended: int = 0


class _KeptRow(Struct, frozen=True, array_like=True):
    number: int
    where: str
    source: str
    values: dict[str, Any] | None  # None: in memory


class _Sample(Struct, frozen=True, array_like=True):
    name: str
    text: str
    prompt: bytes
    targets: list[tuple[bytes, bytes]]


class _Footer(Struct, frozen=True):
    key: str
    facts: RowFacts
    labels: list[str]
    sizes: list[int]  # of the parts of the index, in items
    crc: int


_ROWS = msgspec.msgpack.Decoder(_KeptRow)
_SAMPLES = msgspec.msgpack.Decoder(_Sample)


class KeptRows(Iterable[Kept]):
    """Rows in the order in which they are added. Safe between threads once all are.

    prompt_lengths: The tokens of each prompt.
    completion_lengths: The tokens of each completion, row by row.
    """

    def __init__(self, directory: Callable[[], Path | None]) -> None:
        """Begin without rows. `directory` makes and returns where many lie; None keeps them in memory."""
        self._directory = directory
        self._file: int | None = None  # its descriptor, as long as somebody has these rows
        self._path: Path | None = None
        self._written = 0
        self._tail = bytearray()  # bytes of the file, and those behind them
        self._last: tuple[Row | None, int] = (None, 0)
        self._odd = dict[int, dict[str, Any]]()  # values that are no JSON, by the place of their row
        self._labels = dict[str, int]()
        self._rows = array("Q")
        self._samples = array("Q")
        self._sources = array("H")
        self.prompt_lengths = array("I")
        self.completion_lengths = array("I")

    def add(self, kept: Kept) -> None:
        row, at = self._last
        if row is not kept.row:
            at = self._add_row(kept.row)
            self._last = kept.row, at
        targets = [
            (target.tokens.astype("<i4").tobytes(), np.packbits(target.trained).tobytes())
            for target in kept.targets
        ]
        sample = _Sample(kept.name, kept.text, kept.prompt.astype("<i4").tobytes(), targets)
        self._samples.append(self._append(msgspec.msgpack.encode(sample)))
        self._rows.append(at)
        self._sources.append(self._labels.setdefault(kept.row.source, len(self._labels)))
        self.prompt_lengths.append(kept.prompt.size)
        self.completion_lengths.extend(target.tokens.size for target in kept.targets)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Kept]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Kept:
        sample = _SAMPLES.decode(self._read(self._samples[place]))
        targets = []
        for tokens, bits in sample.targets:
            ids = np.frombuffer(tokens, "<i4").astype(np.int32)
            trained = np.unpackbits(np.frombuffer(bits, np.uint8), count=ids.size).astype(np.bool_)
            targets.append(Target(ids, trained))
        prompt = np.frombuffer(sample.prompt, "<i4").astype(np.int32)
        return Kept(self.row(place), sample.name, sample.text, prompt, tuple(targets))

    def row(self, place: int) -> Row:
        """Return the row of a sample."""
        at = self._rows[place]
        record = _ROWS.decode(self._read(at))
        values = self._odd[at] if record.values is None else record.values
        return Row(record.number, record.where, values, record.source)

    @property
    def labels(self) -> list[str]:
        """Return the source of each row."""
        names = [*self._labels]
        return [names[number] for number in self._sources]

    @property
    def is_large(self) -> bool:
        """Return whether the rows are worth a file that is found again."""
        return self._file is not None and not self._odd

    def close(self) -> None:
        """Delete the file of rows that nobody is to find again; what is open stays readable."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def publish(self, path: Path, key: str, facts: RowFacts) -> None:
        """Put the file in place whole. Raises OSError."""
        assert self._file is not None and self._path is not None
        self._flush()
        parts = self._index()
        index = b"".join(part.tobytes() for part in parts)
        footer = _Footer(key, facts, [*self._labels], [len(part) for part in parts], zlib.crc32(index))
        encoded = msgspec.msgpack.encode(footer)
        _write(self._file, index + encoded + len(encoded).to_bytes(8, "little") + _MAGIC)
        os.fsync(self._file)
        self._path.rename(path)
        self._path = None

    def _index(self) -> list["array[int]"]:
        return [self._rows, self._samples, self._sources, self.prompt_lengths, self.completion_lengths]

    def _add_row(self, row: Row) -> int:
        record = _KeptRow(row.number, row.where, row.source, row.values)
        try:
            encoded = msgspec.msgpack.encode(record)
            if _ROWS.decode(encoded).values == row.values:
                return self._append(encoded)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
            pass
        at = self._append(msgspec.msgpack.encode(_KeptRow(row.number, row.where, row.source, None)))
        self._odd[at] = row.values
        return at

    def _append(self, record: bytes) -> int:
        at = self._written + len(self._tail)
        self._tail += len(record).to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little") + record
        if len(self._tail) >= (_IN_MEMORY if self._file is None else _AT_ONCE):
            self._flush()
        return at

    def _flush(self) -> None:
        """Write what is in memory to the file, as long as there is room for one."""
        try:
            if self._file is None:
                if (directory := self._directory()) is None:
                    return
                self._path = directory / f".{os.getpid()}-{id(self):x}.tmp"
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._has(os.open(self._path, flags, 0o600))
            assert self._file is not None
            _write(self._file, self._tail)
        except OSError:  # there is no room for a file: go on without
            if self._file is not None:
                self._tail = bytearray(os.pread(self._file, self._written, 0)) + self._tail
                self._end()
            self.close()
            self._directory = lambda: None
            self._file = None
            self._written = 0
            return
        self._written += len(self._tail)
        self._tail = bytearray()

    def _has(self, file: int) -> None:
        self._file = file
        self._end = weakref.finalize(self, os.close, file)

    def _read(self, at: int) -> bytes:
        head = self._bytes(at, _HEAD)
        record = self._bytes(at + _HEAD, int.from_bytes(head[:4], "little"))
        if zlib.crc32(record) != int.from_bytes(head[4:], "little"):
            raise IntegrityError("the rows that were made ready are damaged on disk", hint="Start it again.")
        return record

    def _bytes(self, at: int, size: int) -> bytes:
        if at >= self._written:
            return bytes(self._tail[at - self._written : at - self._written + size])
        assert self._file is not None
        return os.pread(self._file, size, at)

    @classmethod
    def opened(cls, path: Path, key: str) -> tuple["KeptRows", RowFacts] | None:
        """Return the rows of a file that this user published; None where it is not one of this key."""
        rows = cls(lambda: None)
        with open_file(path, links=False) as opened:
            file = os.dup(opened.fileno())
        rows._has(file)
        stats = os.fstat(file)
        try:
            if stats.st_uid != os.geteuid() or stats.st_mode & 0o077:
                raise ValueError(f"{path} is somebody else's")
            end = os.pread(file, _END, stats.st_size - _END)
            size = int.from_bytes(end[:8], "little")
            if end[8:] != _MAGIC or size > stats.st_size:
                raise ValueError(f"{path} is no such file")
            encoded = os.pread(file, size, stats.st_size - _END - size)
            footer = msgspec.msgpack.decode(encoded, type=_Footer)
            parts = rows._index()
            sizes = [count * part.itemsize for count, part in zip(footer.sizes, parts, strict=True)]
            rows._written = stats.st_size - _END - size - sum(sizes)
            index = os.pread(file, sum(sizes), rows._written)
            if footer.key != key or zlib.crc32(index) != footer.crc:
                raise ValueError(f"{path} is damaged")
        except (OSError, ValueError, msgspec.MsgspecError):
            rows._end()
            return None
        begin = 0
        for part, length in zip(parts, sizes, strict=True):
            part.frombytes(index[begin : begin + length])
            begin += length
        rows._labels = {label: number for number, label in enumerate(footer.labels)}
        return rows, footer.facts


def _write(file: int, data: bytes | bytearray) -> None:
    with memoryview(data) as view:
        at = 0
        while at < len(view):
            at += os.write(file, view[at:])


class RowsOf(Sequence[Row]):
    """The rows behind samples, each read when it is asked for."""

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._kept.row(number) for number in range(len(self))[place]]
        return self._kept.row(place)
