"""The state of the reconcile loop: what wakes it, what runs beside it, and what it could not do."""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from lorad.daemon.troubles import Troubles

_GLANCE = 0.2  # seconds between two looks at the journals while something is active
REST = 2.0  # seconds after which the loop looks at everything anyway

_Stamp = tuple[int, int]


class Loop:
    """The daemon's loop runs at once for a request or the end of a process, soon for a journal that grew.

    Drivers write all the time, so for a journal alone it does only what depends on journals.

    started_at: Unix time.
    closing: the daemon ends; the verbs that are left of this pass are not done.
    tasks: coroutines that run beside it; they are cancelled when the daemon closes.
    newest: the newest event that its readers were woken for.
    bell: rings when there are new events. A reader takes it before looking for events, and so misses none.
    """

    def __init__(self) -> None:
        self.started_at = time.time()
        self.closing = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.troubles = Troubles()
        self.newest = 0
        self._event = asyncio.Event()
        self._watched: dict[Path, int] = {}
        self._stamps: dict[Path, _Stamp] = {}
        self.bell = asyncio.Event()
        self._looked_at = -math.inf

    def poke(self) -> None:
        """Let the loop run now."""
        self._event.set()

    def looks_at_all(self) -> bool:
        """Decide whether the pass that begins looks at everything: after a poke, and every REST seconds."""
        is_due = self._event.is_set() or time.monotonic() - self._looked_at >= REST
        self._event.clear()
        if is_due:
            self._looked_at = time.monotonic()
        return is_due

    async def wait(self, journals: Iterable[Path]) -> None:
        """Wait until it is poked, a journal changed or REST seconds went by."""
        journals = list(journals)
        self._stamps = {path: self._stamps.get(path, (-1, -1)) for path in journals}
        for _ in range(int(REST / _GLANCE)):
            if self._event.is_set():
                break
            stamps: dict[Path, _Stamp] = dict.fromkeys(journals, (0, 0))
            for path in journals:
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    stamps[path] = (stat.st_size, stat.st_mtime_ns)
            has_grown = stamps != self._stamps
            self._stamps = stamps
            if has_grown:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), _GLANCE if journals else REST)
            if not journals:
                break

    def watch(self, key: Path, open_pidfd: Callable[[], int | None]) -> bool:
        """Poke when the process of a key ends. Returns whether it was not watched yet, and is from now on."""
        if key in self._watched:
            return False
        if (pidfd := open_pidfd()) is not None:
            self._watched[key] = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._ended, key)
        return True

    def ring(self) -> None:
        """Tell all readers of events that there are new ones."""
        bell = self.bell
        self.bell = asyncio.Event()
        bell.set()

    async def rung(self, bell: asyncio.Event, timeout: float) -> bool:
        """Wait for the next `ring` after the bell was taken; False after `timeout` seconds without one."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(bell.wait(), timeout)
        return bell.is_set()

    def close(self) -> None:
        for key in list(self._watched):
            self._ended(key)
        self.ring()

    def _ended(self, key: Path) -> None:
        pidfd = self._watched.pop(key)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self.poke()
