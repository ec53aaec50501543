"""Lends processes to episodes, where each episode goes on by itself."""

import threading
import time
from dataclasses import dataclass, field


@dataclass(eq=False)
class _WaitingEpisode:
    """An episode that waits for a worker, or has got it."""

    episode: int
    since: float
    cost: float
    worker: int | None = None
    called: threading.Event = field(default_factory=threading.Event)


class Lending:
    """Lends so many workers to episodes, each to one at a time. Safe between threads.

    An episode gets the worker that knows it, and waits while that is busy, but no longer than a free worker
    would need to reach the same place: so a slow episode holds up no other.
    """

    def __init__(self, count: int) -> None:
        self._busy = [False] * count
        self._knows: dict[int, int] = {}  # episode -> worker
        self._waiting: list[_WaitingEpisode] = []
        self._lock = threading.Lock()

    def take(self, episode: int, cost: float = 0.0) -> tuple[int, int | None]:
        """Wait for a worker; return it, and another that knew the episode until now.

        cost: The seconds that a worker which does not know the episode would need.
        """
        waiter = _WaitingEpisode(episode, time.monotonic(), cost)
        with self._lock:
            before = self._knows.get(episode)
            if not self._serve(waiter):
                self._waiting.append(waiter)
        while waiter.worker is None:
            left = waiter.since + cost - time.monotonic()
            waiter.called.wait(left if left > 0 else None)
            with self._lock:
                if waiter in self._waiting and self._serve(waiter):
                    self._waiting.remove(waiter)
        return waiter.worker, before if before not in (None, waiter.worker) else None

    def give(self, worker: int) -> None:
        """Take a worker back, for the first episode that waits for it."""
        with self._lock:
            self._busy[worker] = False
            if first := next((waiter for waiter in self._waiting if self._serve(waiter)), None):
                self._waiting.remove(first)
                first.called.set()

    def forget(self, episode: int) -> int | None:
        """Return the worker that knows an episode which is over."""
        with self._lock:
            return self._knows.pop(episode, None)

    def _serve(self, waiter: _WaitingEpisode) -> bool:
        process = self._knows.get(waiter.episode)
        if process is not None and not self._busy[process]:
            chosen = process
        else:
            idle = [worker for worker, busy in enumerate(self._busy) if not busy]
            if not idle or (process is not None and time.monotonic() - waiter.since < waiter.cost):
                return False
            loads = [*self._knows.values()]
            chosen = min(idle, key=loads.count)
        self._busy[chosen] = True
        self._knows[waiter.episode] = chosen
        waiter.worker = chosen
        return True
