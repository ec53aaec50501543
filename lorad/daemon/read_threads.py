"""Database reads that do not block the event loop: read-only connections, each in a thread of its own.

A read sees everything that was committed before it began, so a client that has the answer to a POST reads
what that POST did. If reads overlapped for ever the WAL could never be reset: when it is large, new reads
wait for a moment.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lorad.store.db import Reader, Store

T = TypeVar("T")
_THREADS = 4
WAL_BYTES = 16 << 20  # from here on it is emptied when nobody reads
WAL_TOO_LARGE = 64 << 20  # ... and nobody begins to read until it is


class Readers:
    """Threads for reads. Only the event loop uses this object."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wal = store.path.with_name(store.path.name + "-wal")
        self._threads = ThreadPoolExecutor(_THREADS, "reader")
        self._own = threading.local()
        self._opened: list[Reader] = []
        self._open = asyncio.Event()
        self._open.set()
        self.active = 0

    async def read(self, question: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run `question(rows, *arguments, **options)` in a thread, on rows of one moment.

        Raises what it raises.
        """

        def ask() -> T:
            if not hasattr(self._own, "reader"):
                self._own.reader = Reader(self._store.path)
                self._opened.append(self._own.reader)
            with self._own.reader.at_once() as reader:
                return question(reader, *arguments, **options)

        while not self._open.is_set():
            await self._open.wait()
        self.active += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        finally:
            self.active -= 1
            if not self.active and not self._open.is_set():
                self.tidy()

    def tidy(self) -> None:
        """Empty the WAL if it is large and nobody reads. Called in every pass of the loop; never waits."""
        size = self.wal_bytes()
        if size > WAL_TOO_LARGE:
            self._open.clear()
        if size > WAL_BYTES and not self.active:
            self._store.empty_wal()
        if not self.active or size <= WAL_TOO_LARGE:
            self._open.set()

    def wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except OSError:
            return 0

    def close(self) -> None:
        self._open.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for reader in self._opened:
            reader.close()
