"""The versions that the servers hold, and the directories that they read them from."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lorad.adapters.adapter import Adapter
from lorad.adapters.directory import sha256_of
from lorad.adapters.peft import WEIGHTS
from lorad.adapters.served import divided, served
from lorad.adapters.targets import EXPERTS, experts_of, leaf
from lorad.engines.base import BASE, AdapterSource
from lorad.engines.remote.copies import Copies
from lorad.engines.remote.dialect import ServerSettings
from lorad.engines.remote.fleet import Fleet
from lorad.engines.remote.server import Server
from lorad.engines.remote.transport import ServerTransport
from lorad.engines.versions import Held, Versions, receive
from lorad.errors import AdapterRefused, EngineGone
from lorad.limits.check import refuse_adapter
from lorad.limits.limit import BackendSetup
from lorad.models.facts import read_facts

Shapes = Mapping[str, tuple[int, int]]


@dataclass(eq=False)
class _HeldRemote(Held):
    """A version that the servers hold.

    server_name: the servers' name for the version; None for the base.
    directory: where the servers of this machine read it from; servers on nodes read copies.
    """

    server_name: str | None = None
    directory: Path | None = None


class Holdings:
    """Loads and unloads the versions of servers; `shapes` are (out, in) of every linear of the base."""

    def __init__(
        self, fleet: Fleet, settings: ServerSettings, shapes: Shapes, transport: ServerTransport
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._shapes = shapes
        self._transport = transport
        self._setup = BackendSetup(engine=fleet.dialect.kind.name, model=read_facts(settings.model))
        self._copies = Copies(lambda: fleet.hosts)
        self.versions = Versions(settings.max_versions, _HeldRemote(BASE, ""))
        self.changing = asyncio.Lock()
        self._names: set[str] = set()
        # A server of the user's may hold, of another pool or an earlier life, what has the same name.
        self._mark = f"~{secrets.token_hex(4)}" if fleet.is_attached else ""
        self._left: list[_HeldRemote] = []  # to unload when the servers are awake

    async def add(self, name: str, source: AdapterSource) -> _HeldRemote:
        """Load a version on all serving servers, or on none. Raises what `Engine.load` raises."""
        self.versions.reserve(name)
        try:
            form = await asyncio.to_thread(self._received, source)
            # a name that no server has seen: a load that failed may still appear under its own name
            fresh = f"{name}{self._mark}"
            again = 1
            while fresh in self._names:
                again += 1
                fresh = f"{name}{self._mark}~{again}"
            self._names.add(fresh)
            version = _HeldRemote(name, source.digest, server_name=fresh, bytes=form.bytes)
            try:
                version.directory = await asyncio.to_thread(
                    self._transport.put, str(version.server_name), form
                )
                async with self.changing:
                    await self._copies.put(version.directory)
                    # they have received it when the files that they read are its form, byte for byte
                    assert version.server_name
                    await self._fleet.load(version.server_name, version.directory)
                    expected = await asyncio.to_thread(form.digest)
                    read = [
                        await asyncio.to_thread(sha256_of, version.directory / WEIGHTS),
                        *await self._copies.digests(version.directory),
                    ]
                    version.delivered = next((digest for digest in read if digest != expected), expected)
                    if version.delivered != expected:
                        version.digest = version.delivered
                    self.versions.put(version)
            except BaseException:
                await asyncio.shield(asyncio.create_task(self._discard(version)))
                raise
        except BaseException:
            self.versions.release(name)
            raise
        return version

    async def remove(self, name: str) -> None:
        """Remove a version once nothing uses it, though the caller may be cancelled. Raises NotFound."""
        version = await self.versions.remove(name)

        async def finish() -> None:
            async with self.changing:
                if self._fleet.asleep:
                    self._left.append(version)
                else:
                    await self._discard(version)

        await asyncio.shield(asyncio.create_task(finish()))

    async def fill(self, server: Server, then: Callable[[], None] = lambda: None) -> None:
        """Have a server hold all versions and nothing else, and call `then` before that can change again."""
        async with self.changing:
            versions = {str(version.server_name): version for version in self.versions.table.values()}
            for name in set(server.names) - set(versions):
                await server.unload(name)
            reported = await server.holds() if self._fleet.is_attached else {}
            for name, version in versions.items():
                assert version.directory is not None
                if reported.get(name) == str(version.directory):
                    server.names[name] = version.directory
                elif name not in server.names:
                    if server.host is not None:
                        await self._copies.fill(server.host, version.directory, version.delivered)
                    await server.load(name, version.directory)
            then()

    async def list_reported(self) -> list[_HeldRemote]:
        """Return the versions that every serving server reports as loaded from the directory that it got.

        Raises EngineGone when none answered.
        """
        versions = list(self.versions.table.values())
        if self._fleet.asleep:
            return versions
        said = await self._fleet.holds()
        if not said:
            raise EngineGone("the last server that served died", hint="It restarts automatically; ask again.")
        return [
            version
            for version in versions
            if version.directory is not None
            and all(
                of_one.get(str(version.server_name)) == str(server.reads(version.directory))
                for server, of_one in said
            )
        ]

    async def clear_up(self) -> None:
        """Unload the versions that were removed while the servers slept."""
        async with self.changing:
            discarded = self._left
            self._left = []
            for version in discarded:
                await self._discard(version)

    def close(self) -> None:
        self._transport.close()
        self.versions.table.clear()

    def _received(self, source: AdapterSource) -> Adapter:
        adapter = receive(source, self._shapes, self._settings.max_rank)
        refuse_adapter(self._setup, adapter.config)
        kind = self._fleet.dialect.kind
        parts = kind.divided.get(self._setup.model.model_type, {}) if self._setup.model else {}
        whole = served(adapter, self._shapes, kind.joined, self._settings.dtype)
        form = divided(whole, self._shapes, parts)
        targets = {*self._settings.targets}
        for module in whole.config.modules:
            if leaf(module) not in targets or (experts_of(module) and EXPERTS not in targets):
                raise AdapterRefused(
                    f"{module} is adapted, but the servers were started for "
                    f"{', '.join(self._settings.targets)}",
                    hint="Load it into a pool of its own.",
                )
        return form

    async def _discard(self, version: _HeldRemote) -> None:
        """Unload a version everywhere, and then remove its directory, which a server may still read."""
        if version.directory is not None:
            await self._fleet.unload(str(version.server_name))
            await self._copies.remove(version.directory)
            await asyncio.to_thread(self._transport.remove, version.directory)
