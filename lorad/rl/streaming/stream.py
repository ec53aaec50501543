"""Rows of a source in blocks, each shuffled by itself.

The row at a position follows from seed, source and `data.buffer`, so that a resume sees the same.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct

from lorad.box.memory import bounded_memory
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.rl.sources import Row
from lorad.rl.streaming.reader import Place, Reader

Item = TypeVar("Item")
_BLOCKS = 3  # in memory: steps that look again, or ahead, are near
_BOOKMARKS = 256  # of the blocks last read


class Bookmark(Struct, frozen=True):
    """Where a block begins.

    position: The place of its first item among all that the source ever gives.
    epoch, block: Its numbers, from 0.
    usable: Whether the epoch had an item before.
    place: The place of its first row; None is the beginning.
    """

    position: int = 0
    epoch: int = 0
    block: int = 0
    usable: bool = False
    place: Place | None = None


class Stream(Generic[Item]):
    """What is made of the rows of a source, epoch after epoch. Safe between threads."""

    def __init__(
        self,
        reader: Reader,
        items_of: Callable[[list[Row]], list[Item]],
        seed: int,
        size: int,
        *,
        shuffled: bool,
    ) -> None:
        """Begin at the beginning. `items_of` makes the items of rows; a block has `size` rows."""
        self._reader = reader
        self._items_of = items_of
        self._seed = seed
        self._size = size
        self._shuffled = shuffled
        self._blocks: deque[tuple[Bookmark, list[Item]]] = deque(maxlen=_BLOCKS)
        self._bookmarks = deque([Bookmark()], maxlen=_BOOKMARKS)  # the last is that of the next block
        self._lock = threading.Lock()

    def item(self, position: int) -> tuple[Item, int]:
        """Return what is at a position, and its epoch. Raises SpecError."""
        with self._lock:
            while True:
                for mark, items in self._blocks:
                    if mark.position <= position < mark.position + len(items):
                        return items[position - mark.position], mark.epoch
                if position < self._bookmarks[-1].position:
                    self._go(self._before(position))
                mark = self._bookmarks[-1]
                name = self._reader.identity.partition(" ")[0]
                with bounded_memory(name), HEART.tells(f"reading {name}"):
                    rows = self._reader.read(self._size)
                    items = self._items_of(rows)
                if self._shuffled:
                    random.Random(f"{self._seed}/{mark.epoch}/{mark.block}").shuffle(items)
                end = mark.position + len(items)
                usable = mark.usable or bool(items)
                if len(rows) == self._size:
                    following = Bookmark(end, mark.epoch, mark.block + 1, usable, self._reader.place())
                elif usable:
                    self._reader.seek(None)
                    following = Bookmark(end, mark.epoch + 1)
                else:
                    hint = "Is it empty, or are its rows too long?"
                    raise SpecError(f"{self._reader.identity} has no usable row", key="data", hint=hint)
                if items:
                    self._blocks.append((mark, items))
                self._bookmarks.append(following)

    def in_memory(self) -> list[Item]:
        """Return what is in memory."""
        with self._lock:
            return [item for _, items in self._blocks for item in items]

    def bookmark(self, position: int) -> Bookmark:
        """Return where to begin in order to reach a position soon."""
        with self._lock:
            return self._before(position)

    def restore(self, mark: Bookmark) -> None:
        """Continue from a bookmark, also of another process. Raises SpecError."""
        with self._lock:
            self._bookmarks.clear()
            self._go(mark)

    def _before(self, position: int) -> Bookmark:
        earlier = [mark for mark in self._bookmarks if mark.position <= position]
        return earlier[-1] if earlier else Bookmark()

    def _go(self, mark: Bookmark) -> None:
        self._blocks.clear()
        while self._bookmarks and self._bookmarks[-1].position >= mark.position:
            self._bookmarks.pop()
        self._bookmarks.append(mark)
        self._reader.seek(mark.place)
