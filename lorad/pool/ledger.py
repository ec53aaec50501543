"""Who uses the pool's devices, second by second: what the bill is made of.

Every second of the pool's life is shared by the runs that worked, else by all runs that have a slot, else it
is nobody's. So the entries add up to what the pool used. A pool whose work is all done on its compute thread
knows whose each quantum is; in others (servers, trainers made of ranks) a second belongs to the runs that
have a call under way.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from lorad.models.turns import NOBODY, Payer, caller
from lorad.protocol.status import Use

_HOUR = 3600


class _Seat(NamedTuple):
    """Where a run is: which of its slots, counted from 1, was opened last, and at which step, see `Use`."""

    number: int = 0
    step: int = 0


class Ledger:
    """Used by the pool's asyncio loop and its compute thread.

    Args:
        by_calls: Whether calls are billed, and not quanta; see above.
        since: When the life of the pool began, by the clock.
    """

    def __init__(
        self,
        *,
        devices: int = 1,
        by_calls: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        unix: Callable[[], float] = time.time,
        since: float | None = None,
    ) -> None:
        self.devices = devices
        self._by_calls = by_calls
        self._clock = clock
        self._unix = unix
        self._lock = threading.Lock()
        self._settled = clock() if since is None else since
        self._started: tuple[float, Mapping[Payer, float]] | None = None  # a quantum under way
        self._calls: dict[Payer, int] = {}
        self._tenants: dict[str, Payer] = {}
        self._seats: dict[str, _Seat] = {}
        self._entries: list[Use] = []
        self._by_key: dict[tuple[Payer, _Seat, int], Use] = {}
        self._changed: dict[int, Use] = {}
        self._uncharged: dict[int, float] = {}  # since energy was shared out last

    def opens(self, run: str, step: int) -> None:
        """Note that a run comes, or comes again; what follows stands apart from what was before."""
        with self._lock:
            self._settle(self._clock())
            self._seats[run] = _Seat(self._seat(run).number + 1, step)

    def holds(self, payer: Payer, memory: int) -> None:
        """Note that the payer's run has a slot now, of so many bytes."""
        with self._lock:
            self._settle(self._clock())
            self._tenants[payer.run] = payer
            use = self._entry(payer)
            use.memory = max(use.memory, memory)

    def saved(self, run: str, step: int) -> None:
        """Note that the run has a checkpoint of this step."""
        with self._lock:
            self._settle(self._clock())
            self._seats[run] = _Seat(self._seat(run).number, step)

    def leaves(self, run: str) -> None:
        """Note that the slot of a run is gone."""
        with self._lock:
            self._settle(self._clock())
            self._tenants.pop(run, None)

    def add(
        self, *, generated: int = 0, served: int = 0, trained: int = 0, prompts: int = 0, cached: int = 0
    ) -> None:
        """Count tokens for the payer of the running call."""
        with self._lock:
            use = self._entry(caller().payer)
            use.generated += generated
            use.served += served
            use.trained += trained
            use.prompts += prompts
            use.cached += cached

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Note that the running call is under way inside the block, which matters where calls are billed."""
        if not self._by_calls:
            yield
            return
        payer = caller().payer
        with self._lock:
            self._settle(self._clock())
            self._calls[payer] = self._calls.get(payer, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._settle(self._clock())
                self._calls[payer] -= 1
                if not self._calls[payer]:
                    del self._calls[payer]

    def starts(self, at: float, payers: Mapping[Payer, float]) -> None:
        """Note the payers of a quantum, see `Watch` in lorad/models/compute.py."""
        if self._by_calls:
            return
        with self._lock:
            self._settle(at)
            self._started = at, payers

    def ends(self, at: float, payers: Mapping[Payer, float]) -> None:
        """Bill a quantum, see `Watch`. Who came or went meanwhile pays a part."""
        if self._by_calls or self._started is None:
            return
        with self._lock:
            weights = dict(self._started[1])
            for payer, weight in payers.items():
                weights[payer] = weights.get(payer, 0.0) + weight
            self._started = None
            self._share(at, weights, is_work=True)

    def settle(self, joules: float | None = None, memory: int = 0) -> list[Use]:
        """Bill everything up to now, and return the entries that changed since the last call.

        Args:
            joules: What the devices drew since the last call, which is shared out as they were held; None
                where it is unknown.
            memory: The bytes of the pool.
        """
        with self._lock:
            self._settle(self._clock())
            if joules is not None and (total := sum(self._uncharged.values())) > 0:
                for number, seconds in self._uncharged.items():
                    use = self._touched(self._entries[number - 1])
                    use.joules = (use.joules or 0.0) + joules * seconds / total
                self._uncharged.clear()
            if memory:
                use = self._entry(NOBODY)
                use.memory = max(use.memory, memory)
            changed = self._changed
            self._changed = {}
            return [msgspec.structs.replace(use) for use in changed.values()]

    def put_back(self, uses: list[Use]) -> None:
        """Have the next `settle` return these entries, too, as they could not be written."""
        with self._lock:
            for use in uses:
                self._touched(self._entries[use.entry - 1])

    def entries(self) -> list[Use]:
        """Return all entries of the life."""
        with self._lock:
            return [msgspec.structs.replace(use) for use in self._entries]

    def _settle(self, now: float) -> None:
        """Bill the time since the last call; a quantum under way is billed when it ends."""
        if self._started is not None or now <= self._settled:
            return
        if self._calls:
            self._share(now, dict.fromkeys(self._calls, 1.0), is_work=True)
        else:
            owners = list(self._tenants.values()) or [NOBODY]
            self._share(now, dict.fromkeys(owners, 1.0), is_work=False)

    def _share(self, until: float, weights: Mapping[Payer, float], *, is_work: bool) -> None:
        seconds = max(0.0, until - self._settled) * self.devices
        total = sum(weights.values())
        self._settled = max(until, self._settled)
        for payer, weight in weights.items():
            use = self._entry(payer)
            part = seconds * weight / total
            use.held += part
            use.busy += part if is_work else 0.0
            self._uncharged[use.entry] = self._uncharged.get(use.entry, 0.0) + part

    def _entry(self, payer: Payer) -> Use:
        seat = self._seat(payer.run) if payer.attempt else _Seat()
        hour = int(self._unix()) // _HOUR * _HOUR
        use = self._by_key.get((payer, seat, hour))
        if use is None:
            step = max(0, seat.step)
            use = Use(len(self._entries) + 1, hour, payer.run, payer.attempt, step, payer.alias)
            self._entries.append(use)
            self._by_key = {key: entry for key, entry in self._by_key.items() if key[2] == hour}
            self._by_key[payer, seat, hour] = use
        return self._touched(use)

    def _seat(self, run: str) -> _Seat:
        return self._seats.get(run, _Seat())

    def _touched(self, use: Use) -> Use:
        self._changed[use.entry] = use
        return use
