"""Orders of rows: what is at a position follows from the seed and the rows alone."""

import math
import random
import threading
from array import array
from collections.abc import Mapping, Sequence

from lorad.errors import SpecError
from lorad.rl.kept.rows import KeptRows
from lorad.spec.data import Sources, labels_of, weight_of


class Order:
    """Rows of a dataset, epoch after epoch. Shuffled, every epoch has its own order, from (seed, epoch)."""

    def __init__(self, size: int, seed: int | str, *, shuffled: bool) -> None:
        self._size = size
        self._seed = seed
        self._shuffled = shuffled
        self._epoch = -1
        self._places = list[int]()

    def place(self, index: int) -> tuple[int, int]:
        """Return the row at a position of the endless sequence, and its epoch."""
        epoch, offset = divmod(index, self._size)
        if epoch != self._epoch:
            places = list(range(self._size))
            if self._shuffled:
                random.Random(f"{self._seed}/{epoch}").shuffle(places)
            self._epoch = epoch
            self._places = places
        return self._places[offset], epoch


class _RowMixture:
    """Rows of several sources in given shares, each source in its own order, epoch after epoch.

    At each position comes the source that is furthest behind its share, the first of such: after n positions
    each has its share of n, to less than the number of sources. So shares hold within every step.
    """

    def __init__(
        self, labels: Sequence[str], shares: Mapping[str, float], seed: int, *, shuffled: bool
    ) -> None:
        """Mix rows whose sources are `labels`. Raises SpecError where a source has no row."""
        total = math.fsum(shares.values())
        self._shares = [share / total for share in shares.values()]
        rows: dict[str, list[int]] = {label: [] for label in shares}
        for place, label in enumerate(labels):
            rows[label].append(place)
        if empty := [label for label, places in rows.items() if not places]:
            hint = "Leave it out, or see whether its rows are too long."
            raise SpecError(f"{empty[0]} has no usable row", key="data", hint=hint)
        self._rows = [*rows.values()]
        seeds = (f"{seed}/{label}" for label in shares)
        self._orders = [
            Order(len(places), own, shuffled=shuffled) for places, own in zip(self._rows, seeds, strict=True)
        ]
        self._counts = [0] * len(self._rows)
        self._sources = array("H")
        self._numbers = array("Q")  # of each position that was asked for
        self._growing = threading.Lock()

    def place(self, index: int) -> tuple[int, int]:
        """Return the row at a position of the endless sequence, and the epoch of its source."""
        with self._growing:
            for position in range(len(self._sources), index + 1):
                behind = [s * (position + 1) - n for s, n in zip(self._shares, self._counts, strict=True)]
                chosen = behind.index(max(behind))
                self._sources.append(chosen)
                self._numbers.append(self._counts[chosen])
                self._counts[chosen] += 1
            source = self._sources[index]
            number = self._numbers[index]
            place, epoch = self._orders[source].place(number)
            return self._rows[source][place], epoch


def order_of(kept: KeptRows, sources: Sources, seed: int, *, shuffled: bool) -> Order | _RowMixture:
    """Return the order of rows of these sources. Raises SpecError."""
    if isinstance(sources, dict) and sources:
        labels = labels_of(sources)
        shares = {labels[name]: weight_of(share) for name, share in sources.items()}
        return _RowMixture(kept.labels, shares, seed, shuffled=shuffled)
    return Order(len(kept), seed, shuffled=shuffled)
