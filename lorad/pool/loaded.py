"""Which versions the engine holds, under which of its names, for whom, and when they go.

A version is held by the run that published it (current and previous), or because somebody is served from it.
The engine's name is the version's own; only when that was used before (a version reloaded from its files, or
published again by a later attempt) it gets a suffix, because an engine never sees a name twice.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lorad.engines.base import AdapterSource, Engine
from lorad.errors import Conflict, IntegrityError, NotFound
from lorad.protocol.calls import Attestation

log = logging.getLogger(__name__)

SPARE = 8  # served versions that stay loaded though nobody uses them

_UNKNOWN = Attestation("inconclusive", "it is being attested")

_clock = itertools.count()


@dataclass(eq=False)
class PoolVersion:
    """One loaded version.

    Attributes:
        needed_by_run: Whether its run has not released it.
        served: Whether the daemon asked for it.
        kept: Whether it stays until it is let go.
        verdict: The verdict of its attestation when it was loaded.
        delivered: See `LoadedVersion`.
        used: The logical time of its last use.
        idle: An event that is set when the last of `users` goes.
    """

    version: str
    engine_name: str
    digest: str
    needed_by_run: bool
    served: bool
    kept: bool = False
    verdict: Attestation = _UNKNOWN
    users: int = 0
    delivered: str = ""
    used: int = field(default_factory=lambda: next(_clock))
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class LoadedVersions:
    """The versions that the engine holds; unloading waits in the background for requests in flight.

    All methods belong to the pool's asyncio loop. `forget` hears the engine's name of each version before it
    is unloaded.
    """

    def __init__(self, engine: Engine, forget: Callable[[str], None]) -> None:
        self._engine = engine
        self._forget = forget
        self._entries: dict[str, PoolVersion] = {}
        self._names: dict[str, int] = {}
        self._loading = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    def names(self) -> list[str]:
        return sorted(self._entries)

    def kept(self) -> list[str]:
        return sorted(entry.version for entry in self._entries.values() if entry.kept)

    def let_go(self, version: str) -> None:
        """End `kept`: drop the version unless its run still uses it."""
        if (entry := self._entries.get(version)) is not None and entry.kept:
            entry.kept = entry.served = False
            if not entry.needed_by_run:
                self._drop(entry)

    async def make_room(self, version: str, places: int) -> None:
        """Make room for so many more versions: unload the ones that were served and are unused.

        Raises Conflict.
        """
        while len(loaded := await self._engine.loaded()) + places > (
            most := self._engine.capabilities().max_versions
        ):
            if not self._trim(places=places) and not self._background:
                names = ", ".join(sorted(version.name for version in loaded))
                raise Conflict(
                    f"{version} does not fit: {len(loaded)} versions are loaded, the engine holds {most}, "
                    f"and {version} needs {places}"
                    + (" (one for the copies that attest it)" if places > 1 else ""),
                    hint=f"Unpin one, or let a run keep fewer. Loaded: {names}.",
                )
            await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)

    async def publish(self, version: str, source: AdapterSource) -> PoolVersion:
        """Load a run's new version; nobody finds it before `adopt`. A load that fails changes nothing."""
        count = self._names[version] = self._names.get(version, 0) + 1
        name = version if count == 1 else f"{version}+{count}"
        loaded = await self._engine.load(name, source)
        return PoolVersion(
            version, name, source.digest, needed_by_run=True, served=False, delivered=loaded.delivered
        )

    def adopt(self, entry: PoolVersion) -> None:
        """Put an entry that passed its attestation in place: from now on its version means it."""
        if (old := self._entries.get(entry.version)) is not None:
            self._drop(old)
        self._entries[entry.version] = entry

    async def refuse(self, entry: PoolVersion) -> None:
        """Unload an entry that did not pass, before this returns."""
        self._forget(entry.engine_name)
        await self._engine.unload(entry.engine_name)

    def release(self, entry: PoolVersion) -> None:
        """Let go of an entry on behalf of its run; it stays while it is served."""
        entry.needed_by_run = False
        if not entry.served:
            self._drop(entry)
        self._trim()

    async def serve(
        self, version: str, digest: str, bring: Callable[[], Awaitable[PoolVersion]], *, keep: bool = False
    ) -> PoolVersion:
        """Return the loaded version, or what `bring` loads.

        Raises IntegrityError when other bytes are loaded.
        """
        if version not in self._entries:
            async with self._loading:
                if version not in self._entries:
                    brought = await bring()
                    brought.needed_by_run = False
                    if version in self._entries:  # published meanwhile
                        self._drop(brought)
                    else:
                        self._entries[version] = brought
        entry = self._entries[version]
        if entry.digest != digest:
            raise IntegrityError(
                f"{version} is loaded as sha256 {entry.digest}, not {digest}",
                hint="Its files were changed since; use another version.",
            )
        entry.served = True
        entry.kept = entry.kept or keep
        entry.used = next(_clock)
        self._trim()
        return entry

    @contextmanager
    def use(self, version: str) -> Iterator[PoolVersion]:
        """Keep a version from being trimmed. Raises NotFound."""
        entry = self._entries.get(version)
        if entry is None:
            raise NotFound(f"{version} is not loaded", hint=f"Loaded: {', '.join(self.names()) or 'none'}.")
        entry.users += 1
        entry.idle.clear()
        try:
            yield entry
        finally:
            entry.users -= 1
            entry.used = next(_clock)
            if not entry.users:
                entry.idle.set()
            self._trim()

    async def settle(self) -> None:
        """Wait for unloads under way."""
        while self._background:
            await asyncio.wait(self._background)

    def _trim(self, places: int = 0) -> bool:
        """Unload versions that are only there in case they are asked for again: at least `places` of them."""
        spare = [e for e in self._entries.values() if e.served and not (e.needed_by_run or e.kept or e.users)]
        gone = sorted(spare, key=lambda e: e.used)[: max(places, len(spare) - SPARE)]
        for entry in gone:
            self._drop(entry)
        return bool(gone)

    def _drop(self, entry: PoolVersion) -> None:
        """Hide an entry from now on, and unload it when its last user has finished."""
        if self._entries.get(entry.version) is entry:
            del self._entries[entry.version]

        async def unload() -> None:
            while entry.users:
                await entry.idle.wait()
            self._forget(entry.engine_name)
            await self._engine.unload(entry.engine_name)

        task = asyncio.create_task(unload())
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a version could not be unloaded: %s", error)
