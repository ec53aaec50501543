"""Follows one journal for one logger, and writes exactly its lineage, whoever dies when.

A `rewind` that takes steps back ends a segment: the next one continues the lineage from an earlier step.
"""

import contextlib
import json
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from lorad.files import open_file
from lorad.loggers.cursor import Cursor, CursorFile
from lorad.loggers.logger import Logger, Point, Segment, flattened
from lorad.loggers.markdown import as_markdown
from lorad.protocol.journal import Place, Record, read, read_on

_OF_EVAL = ("score", "nll", "accuracy")  # facts of an evaluation that have a curve


class Follower:
    """Brings one logger up to date with one journal; the cursor moves after `flush_every` points at most."""

    def __init__(
        self, journal: Path, make: Callable[[], Logger], file: CursorFile, *, flush_every: int = 256
    ) -> None:
        self._journal = journal
        self._make = make
        self._file = file
        self._flush_every = flush_every
        self._logger: Logger | None = None
        self._cursor = Cursor()
        self._place = Place()
        self._reached = -1  # step
        self._unflushed = 0  # points

    def catch_up(self, *, is_over: bool = False) -> None:
        """Write what is new; close the logger of a run that is over, which no attempt works on.

        Raises what the logger raises, OSError, Conflict: call `drop` then, and this again later.
        """
        records = read_on(self._journal, self._place) if self._logger is not None else None
        if records is None:
            self.drop()  # the record that was read last is gone, or nothing is open
            self._file.hold()
            self._cursor = self._file.load()
            if self._cursor.done and next(read(self._journal, self._cursor.done), None) is None:
                self._file.release()  # nothing was journaled since the logger was closed
                return
            self._begin()
            records = read(self._journal, self._place.offset)
        ended: str | None = "" if is_over else None
        for record, offset in records:
            if record.kind == "end":
                ended = str(record.data.get("reason", ""))
            elif record.kind != "warning":
                ended = "" if is_over else None
            self._take(record, offset)
            self._place = Place(self._place.offset, offset, record.seq, record.crc)
            if self._unflushed >= self._flush_every:
                self._save()
        if ended is not None:  # the cursor says that all is written so far, and where to begin if more comes
            self._opened.flush()
            self._opened.close(ended)
            self._logger = None
            self._unflushed = 0
            self._cursor = replace(self._cursor, done=self._place.offset)
            self._file.save(self._cursor)
            self._file.release()
        elif self._unflushed:
            self._save()

    def drop(self) -> None:
        """Give the logger up as it is; the next life begins at the cursor."""
        logger = self._logger
        self._logger = None
        if logger is not None:
            with contextlib.suppress(Exception):
                logger.close()
        self._file.release()

    def _begin(self) -> None:
        """Open the logger where its cursor stands."""
        logger = self._make()
        at = self._cursor
        if at.offset > 0:
            with self._journal.open("rb") as file:
                file.seek(at.offset - 1)
                if file.read(1) != b"\n":  # no record ended there: somebody cut the journal
                    at = Cursor()
        if logger.whole_segments:
            at = Cursor(at.segment_offset, at.segment, at.segment_after, at.segment_offset, at.segment_after)
        self._cursor = replace(at, done=0)
        self._place = Place(offset=at.offset)
        self._reached = at.step
        self._unflushed = 0
        self._logger = logger
        logger.begin(Segment(at.segment, at.segment_after), at.step)

    def _take(self, record: Record, offset: int) -> None:
        """Put a record's figures; a rewind to a step before the last begins another segment."""
        if record.kind == "rewind" and record.data["to"] < self._reached:
            to = record.data["to"]
            self._opened.flush()
            self._opened.close("superseded")
            self._logger = self._make()
            self._cursor = Cursor(offset, self._cursor.segment + 1, to, offset, to)
            self._reached = to
            self._unflushed = 0
            self._opened.begin(Segment(self._cursor.segment, to), to)
            self._save()
        elif record.kind in ("step", "eval"):
            if record.kind == "step":
                self._cursor = replace(self._cursor, offset=self._place.offset, step=record.step - 1)
            if figures := values(record):
                texts: dict[str, str] = {}  # the first samples of a step, where they are kept
                count = self._opened.samples if record.kind == "step" else 0
                place = self._journal.parent / str(record.data.get("samples", ""))
                if count and place.is_file():
                    with open_file(place) as file:
                        lines = [line for line in islice(file, count) if line.endswith(b"\n")]
                    texts = {f"samples/{n}": as_markdown(json.loads(line)) for n, line in enumerate(lines, 1)}
                self._opened.put(Point(record.step, record.at, figures, texts))
                self._unflushed += 1
            self._reached = max(self._reached, record.step)

    def _save(self) -> None:
        """Flush first, then move the cursor."""
        self._opened.flush()
        self._file.save(self._cursor)
        self._unflushed = 0

    @property
    def _opened(self) -> Logger:
        assert self._logger is not None
        return self._logger


def values(record: Record) -> dict[str, float]:
    """Return the figures of a record of kind `step` or `eval`, by name.

    A metric of a step is NaN where it was not finite, which is null in the journal.
    """
    if record.kind == "step":
        metrics = record.data["metrics"].items()
        named = {f"train/{name}": math.nan if value is None else float(value) for name, value in metrics}
        return named | {"lorad/version": float(record.data["version"])}
    figures = {key: record.data.get(key) for key in _OF_EVAL}
    for name, scored in record.data.get("sets", {}).items():
        figures[name] = {"score": scored["score"], **scored["passed"]}
    numbers = flattened("eval", figures, "/")
    return {name: float(value) for name, value in numbers if type(value) in (int, float)}
