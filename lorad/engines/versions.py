"""The versions that an engine holds, who uses them, and the check of an adapter before it is loaded."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import read_peft
from lorad.adapters.validate import validate
from lorad.engines.base import BASE, AdapterSource, LoadedVersion
from lorad.errors import AdapterRefused, Conflict, NotFound


@dataclass(eq=False)
class Held:
    """A version that an engine holds, or the base; `LoadedVersion` says what `delivered` is."""

    name: str
    digest: str
    delivered: str = field(default="", kw_only=True)
    bytes: int = field(default=0, kw_only=True)
    in_flight: int = field(default=0, kw_only=True)
    leaving: bool = field(default=False, kw_only=True)
    idle: asyncio.Event = field(default_factory=asyncio.Event, kw_only=True)

    def describe(self) -> LoadedVersion:
        return LoadedVersion(self.name, self.digest, self.bytes, self.in_flight, self.delivered)


H = TypeVar("H", bound=Held)


class Versions(Generic[H]):
    """A table of versions beside the base. All methods belong to the engine's asyncio loop."""

    def __init__(self, most: int, base: H) -> None:
        self.most = most
        self.base = base
        self.table: dict[str, H] = {}
        self.names: set[str] = {BASE}

    def reserve(self, name: str) -> None:
        """Claim a name before its load. Raises Conflict when it was ever used or the table is full."""
        if name in self.names:
            raise Conflict(
                f"version name {name} was used before", hint="versions are immutable: publish a new number"
            )
        if len(self.table) >= self.most:
            raise Conflict(f"{self.most} versions are loaded, no more fit", hint="unpin or unload one")
        self.names.add(name)

    def release(self, name: str) -> None:
        """Give back the name of a load that failed."""
        self.names.discard(name)

    def put(self, version: H) -> None:
        self.table[version.name] = version

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[H]:
        """Keep a version loaded for a while. Raises NotFound."""
        version = self._find(name)
        version.in_flight += 1
        version.idle.clear()
        try:
            yield version
        finally:
            version.in_flight -= 1
            if not version.in_flight:
                version.idle.set()

    async def remove(self, name: str) -> H:
        """Refuse new users, wait for the present ones, forget it; returns what it was. Raises NotFound."""
        version = self._find(name)
        if version is self.base:
            raise Conflict("the base cannot be unloaded", hint="stop the pool instead")
        version.leaving = True
        try:
            await self._idle(version)
            return self.table.pop(name)
        finally:
            version.leaving = False

    async def drained(self) -> None:
        """Return when nobody uses any version, the base included."""
        while busy := [version for version in (self.base, *self.table.values()) if version.in_flight]:
            await self._idle(busy[0])

    @staticmethod
    async def _idle(version: H) -> None:
        while version.in_flight:
            await version.idle.wait()

    def _find(self, name: str) -> H:
        version = self.base if name == BASE else self.table.get(name)
        if version is None or version.leaving:
            raise NotFound(f"version {name} is not loaded", hint="`lorad adapters` shows what is")
        return version


def receive(source: AdapterSource, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> Adapter:
    """Return the adapter of a source; `shapes` are (out, in) of every linear of the base.

    Raises AdapterRefused when its sha256 is not `source.digest`, and when it does not fit.
    """
    if source.adapter is not None:
        adapter = source.adapter
    elif source.directory is not None:
        adapter = read_peft(source.directory)
    else:
        raise AdapterRefused("a source needs an adapter or a directory")
    digest = adapter.digest()
    if digest != source.digest:
        raise AdapterRefused(
            f"the adapter's sha256 is {digest}, not {source.digest}",
            hint="it was changed on its way: publish it again",
        )
    if adapter.config.max_rank > max_rank:
        raise AdapterRefused(
            f"rank {adapter.config.max_rank} exceeds {max_rank}, the most that this engine takes",
            hint="lower lora.rank, and lora.experts.rank",
        )
    validate(adapter, shapes)
    return adapter
