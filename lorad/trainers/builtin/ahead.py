"""Micro-batches as they are computed: the next one is laid out while a GPU works on one."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from lorad.models.base import Base
from lorad.trainers.builtin.microbatch import BatchPiece, Laid, Microbatch, lay

_Joined = dict[int, BatchPiece]
"""The pieces of a micro-batch, by what they are pieces of."""
T = TypeVar("T")


class LayoutsAhead:
    """The micro-batches of one call, in their order.

    A pass launches its kernels, then calls `lay`, and then waits for what they have computed: so the GPU does
    not wait for the host, which takes some tens of milliseconds for a large micro-batch.
    """

    def __init__(self, base: Base, batches: Iterable[_Joined]) -> None:
        self._base = base
        self._left = iter(batches)
        self._joined: _Joined | None = None
        self._laid: Laid | None = None

    def each(self, quantum: Callable[["LayoutsAhead"], T]) -> Iterator[Callable[[], T]]:
        """Yield a call of `quantum` for each micro-batch, which it must `take`."""
        while self._is_there():
            yield partial(quantum, self)

    def _is_there(self) -> bool:
        """Return whether there is another one, which is cut from its batch if it was not."""
        if self._joined is None:
            self._joined = next(self._left, None)
        return self._joined is not None

    def lay(self) -> None:
        """Lay the next one out, if there is one and it is not."""
        if self._is_there() and self._laid is None:
            assert self._joined is not None
            self._laid = lay(self._base, [*self._joined.values()])

    def take(self) -> tuple[_Joined, Microbatch]:
        """Return the next one on the device. There must be one."""
        self.lay()
        joined = self._joined
        laid = self._laid
        assert joined is not None and laid is not None
        self._joined = self._laid = None
        return joined, laid.moved(self._base)
