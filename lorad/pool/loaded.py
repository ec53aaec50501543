"""Which versions the engine holds, under which of its names, for whom, and when they go.

A version is held by the run that published it (current and previous), or because somebody is served from it. The
engine's name is the version's own; only when that was used before (a version reloaded from its files, or published
again by a later attempt) it gets a suffix, because an engine never sees a name twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lorad.engines.base import AdapterSource, Engine
from lorad.errors import IntegrityError, NotFound

log = logging.getLogger(__name__)

SPARE = 8  # served versions that stay loaded though nobody uses them

_clock = itertools.count()


@dataclass(eq=False)
class Entry:
    """One loaded version. `held`: its run still wants it. `served`: the daemon asked for it. `used`: a logical time."""

    version: str
    engine_name: str
    digest: str
    held: bool
    served: bool
    users: int = 0
    used: int = field(default_factory=lambda: next(_clock))


class LoadedVersions:
    """All methods belong to the pool's asyncio loop; unloading waits for requests in flight, in the background.

    forget: is told the engine's name of each version that goes, before it goes.
    """

    def __init__(self, engine: Engine, forget: Callable[[str], None]) -> None:
        self._engine, self._forget = engine, forget
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, int] = {}
        self._loading = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    def names(self) -> list[str]:
        return sorted(self._entries)

    def find(self, version: str) -> Entry | None:
        return self._entries.get(version)

    async def publish(self, version: str, source: AdapterSource) -> Entry:
        """Load a run's new version; nobody finds it before `adopt`. A load that fails changes nothing."""
        return await self._load(version, source, held=True)

    def adopt(self, entry: Entry) -> None:
        """The entry passed its attestation: from now on its version means it."""
        if (old := self._entries.pop(entry.version, None)) is not None:
            self._drop(old)
        self._entries[entry.version] = entry

    async def refuse(self, entry: Entry) -> None:
        """The entry did not pass: gone, before this returns."""
        self._forget(entry.engine_name)
        await self._engine.unload(entry.engine_name)

    def release(self, entry: Entry) -> None:
        """Its run does not want it any more; it stays while it is served."""
        entry.held = False
        if not entry.served and self._entries.get(entry.version) is entry:
            del self._entries[entry.version]
            self._drop(entry)
        self._trim()

    async def serve(self, version: str, digest: str, read: Callable[[], Awaitable[AdapterSource]]) -> Entry:
        """The loaded version, or a load of what `read` gives. Raises IntegrityError when other bytes are loaded."""
        async with self._loading:
            entry = self._entries.get(version)
            if entry is None:
                entry = self._entries[version] = await self._load(version, await read(), held=False)
            elif entry.digest != digest:
                raise IntegrityError(
                    f"{version} is loaded as sha256 {entry.digest}, not {digest}",
                    hint="Its files were changed since; use another version.",
                )
            entry.served, entry.used = True, next(_clock)
            self._trim()
            return entry

    def withdraw(self, entry: Entry) -> None:
        """Nobody is to be served from the entry any more."""
        entry.served = False
        if not entry.held and self._entries.get(entry.version) is entry:
            del self._entries[entry.version]
            self._drop(entry)

    @contextmanager
    def use(self, version: str) -> Iterator[Entry]:
        """Keep a version from being trimmed. Raises NotFound."""
        entry = self._entries.get(version)
        if entry is None:
            raise NotFound(f"{version} is not loaded", hint=f"Loaded: {', '.join(self.names()) or 'none'}.")
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users, entry.used = entry.users - 1, next(_clock)
            self._trim()

    async def settle(self) -> None:
        """Wait for unloads under way."""
        while self._background:
            await asyncio.wait(self._background)

    async def _load(self, version: str, source: AdapterSource, *, held: bool) -> Entry:
        count = self._names[version] = self._names.get(version, 0) + 1
        name = version if count == 1 else f"{version}+{count}"
        await self._engine.load(name, source)
        return Entry(version, name, source.digest, held=held, served=not held)

    def _trim(self) -> None:
        spare = [e for e in self._entries.values() if e.served and not e.held and not e.users]
        for entry in sorted(spare, key=lambda e: e.used)[: max(0, len(spare) - SPARE)]:
            del self._entries[entry.version]
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._forget(entry.engine_name)
        self._later(self._engine.unload(entry.engine_name))

    def _later(self, unload: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(unload)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a version could not be unloaded: %s", error)
