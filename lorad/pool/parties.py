"""Who takes turns in a pool: each run, by its priority, and everybody who is served.

See `lorad/models/turns.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lorad.models.turns import Caller, Party, caller
from lorad.protocol.calls import Call

MOST_PRIORITY = 4  # and as far below zero


def weight_of(priority: int) -> float:
    """Twice as much for each step, between 2^-4 and 2^4."""
    return 2.0 ** max(-MOST_PRIORITY, min(priority, MOST_PRIORITY))


class Parties:
    """All methods belong to the pool's asyncio loop."""

    def __init__(self) -> None:
        self._runs: dict[str, Party] = {}
        self._served = Party("serve", goes_first=True)
        self._on_slot: dict[str, float] = {}

    def caller(self, call: Call) -> Caller:
        """Return who makes this call."""
        return Caller(self.of(call.run) if call.run else self._served)

    def of(self, run: str) -> Party:
        return self._runs.setdefault(run, Party(run))

    def joins(self, run: str, priority: int) -> None:
        """Reset the time that the run has waited, and set its weight."""
        party = self.of(run)
        party.weight, party.waited = weight_of(priority), 0.0
        self._on_slot.pop(run, None)

    def leaves(self, run: str) -> None:
        """Forget the run; its calls under way keep their weight."""
        self._runs.pop(run, None)
        self._on_slot.pop(run, None)

    @contextmanager
    def on_slot(self, run: str) -> Iterator[None]:
        """Count the time that a call's work on the slot of its run waits inside the block, until `take`."""
        before = caller().waited
        try:
            yield
        finally:
            self._on_slot[run] = self._on_slot.get(run, 0.0) + caller().waited - before

    def take(self, run: str) -> float:
        """Return the seconds that its work on its slot waited since this was asked last."""
        return self._on_slot.pop(run, 0.0)
