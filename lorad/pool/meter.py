"""How much a pool does: trained tokens of the last seconds,
and since when nobody has asked it for anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

WINDOW = 10.0  # seconds


class Meter:
    """All methods belong to the pool's asyncio loop."""

    def __init__(self) -> None:
        self._trained: deque[tuple[float, int]] = deque()
        self._active = 0
        self._last = time.monotonic()
        self.drivers = 0  # connections that runs have open

    @contextmanager
    def activity(self) -> Iterator[None]:
        """Count the call inside the block as use of the pool."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self._last = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        return 0.0 if self._active else time.monotonic() - self._last

    def trained(self, tokens: int) -> None:
        self._trained.append((time.monotonic(), tokens))

    @property
    def trained_per_second(self) -> float:
        since = time.monotonic() - WINDOW
        while self._trained and self._trained[0][0] < since:
            self._trained.popleft()
        return sum(tokens for _, tokens in self._trained) / WINDOW
