"""A trainer whose ranks are processes of their own: the trainer protocol in the pool."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lorad.adapters.adapter import Adapter
from lorad.children.host import Host
from lorad.errors import SpecError
from lorad.protocol.calls import TrainerVerb
from lorad.protocol.pool_setup import Quantize, RanksSetup
from lorad.trainers.base import (
    CloseSlot,
    LoadSlot,
    OpenSlot,
    SaveSlot,
    SlotSpec,
    Trainer,
    TrainerCapabilities,
    TrainerHealth,
    check_verb,
)
from lorad.trainers.ranks.calls import RanksReady
from lorad.trainers.ranks.config import RanksConfig, TrainerDirectories
from lorad.trainers.ranks.processes import RankProcesses
from lorad.trainers.ranks.spread import Spread
from lorad.trainers.sharded.body import BodySettings

T = TypeVar("T")

_BODIES = {
    "fsdp": "lorad.trainers.fsdp.body:open_body",
    "megatron": "lorad.trainers.megatron.body:open_body",
}


class RanksSettings(Struct, frozen=True, kw_only=True):
    """What the pool decides about its ranks."""

    backend: str
    model: Path  # its directory
    name: str  # the base's name in configurations of adapters
    dtype: Literal["float32", "bfloat16"]
    devices: tuple[str, ...] = ("cpu",)  # or a `cuda:<n>` for each rank, among those that the pool sees
    threads: int = 1  # of each rank
    body: str | None = None  # a `module:function` instead of the backend's own; `env` may name its place
    hang: float = 120.0  # seconds without a heartbeat after which a rank is hung
    quantize: Quantize | None = None


class RemoteTrainer(Trainer):
    """A trainer whose ranks `start` starts."""

    @classmethod
    async def start(
        cls,
        setup: RanksSetup,
        settings: RanksSettings,
        *,
        work: Path,
        logs: Path,
        hosts: Sequence[Host] = (),
    ) -> Self:
        """Start every rank and wait until all are ready.

        Raises what a rank refuses its settings with (SpecError, …), and PoolLost with the cause by the log.

        Args:
            work: An existing directory, the same in each life of the pool, which clears it away.
            logs: The directory of `trainer.log`.
            hosts: Other machines, which have all ranks.
        """
        places = TrainerDirectories(work, logs)
        config = _config(setup, settings, places)
        spread = Spread(hosts, setup) if hosts else None
        # lorad's own interpreter may have what the ranks import by the pool's PYTHONPATH alone
        own = {} if setup.python else {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        environment = places.environment({**own, **setup.env}, settings.devices, settings.threads)
        processes = RankProcesses(config, places, environment, settings.hang, spread)
        try:
            ready = await processes.start()
        except BaseException:
            await processes.end()
            raise
        return cls(processes, ready, spread)

    def __init__(self, processes: RankProcesses, ready: RanksReady, spread: Spread | None) -> None:
        self._processes = processes
        self._ready = ready
        self._spread = spread
        self._slots: dict[str, None] = {}
        self._with_files: set[asyncio.Task[Any]] = set()

    def capabilities(self) -> TrainerCapabilities:
        return self._ready.capabilities

    def modules(self) -> dict[str, tuple[int, int]]:
        return dict(self._ready.modules)

    def software(self) -> dict[str, str]:
        return dict(self._ready.software)

    def slots(self) -> tuple[str, ...]:
        return tuple(self._slots)

    async def do(self, verb: TrainerVerb[T]) -> T:
        check_verb(verb, self.slots(), self.capabilities())
        has_files = isinstance(verb, OpenSlot | SaveSlot | LoadSlot)
        if self._spread is None or not has_files:
            return await self._asked(verb)
        # on other machines the files stay until the ranks are done, also when the caller is cancelled
        task = asyncio.create_task(self._asked(verb))
        self._with_files.add(task)
        task.add_done_callback(self._with_files.discard)
        return await asyncio.shield(task)

    async def _asked(self, verb: TrainerVerb[T]) -> T:
        async with self._reachable(verb) as reachable:
            return await self._processes.ask(reachable, partial(self._note, verb))

    @asynccontextmanager
    async def _reachable(self, verb: Any) -> AsyncIterator[Any]:
        """Yield the verb with the paths by which the ranks find its files."""
        match verb:
            case OpenSlot(spec=SlotSpec(source=Path() as source)):
                async with self._readable(source) as path:
                    yield replace(verb, spec=replace(verb.spec, source=path))
            case LoadSlot():
                async with self._readable(verb.directory) as path:
                    yield replace(verb, directory=path)
            case SaveSlot():
                writable = nullcontext(verb.directory.absolute())
                async with self._spread.fetched(verb.directory) if self._spread else writable as path:
                    yield replace(verb, directory=path)
            case _:
                yield verb

    def _readable(self, directory: Path) -> AbstractAsyncContextManager[Path]:
        return self._spread.put(directory) if self._spread else nullcontext(directory.absolute())

    def _note(self, verb: TrainerVerb[Any]) -> None:
        """Note which slots are open once a verb is done, also when its caller was cancelled."""
        if isinstance(verb, OpenSlot):
            self._slots[verb.slot] = None
        elif isinstance(verb, CloseSlot):
            del self._slots[verb.slot]

    async def export(self, slot: str) -> Adapter:
        adapter = await super().export(slot)
        for tensor in adapter.tensors.values():
            tensor.flags.writeable = False
        return adapter

    async def health(self) -> TrainerHealth:
        """Return the health, with the memory of the last call."""
        processes = self._processes
        if why := processes.why:
            return TrainerHealth(alive=False, detail=why)
        peak = processes.peak
        processes.peak = processes.memory
        return TrainerHealth(memory=processes.memory, memory_peak=peak)

    async def shut_down(self) -> None:
        await self._processes.end()


def _config(setup: RanksSetup, settings: RanksSettings, places: TrainerDirectories) -> RanksConfig:
    """Return what the ranks read. Raises SpecError for an unknown backend, or devices that do not fit."""
    devices = [device for device in settings.devices if device != "cpu"]
    if devices and len(devices) != setup.ranks:
        raise SpecError(
            f"tp x pp x dp is {setup.ranks} ranks, but there are {len(devices)} devices",
            key="trainer",
            hint="Each rank needs a device of its own: change resources.devices, or trainer.dp.",
        )
    if (body := settings.body or _BODIES.get(settings.backend)) is None:
        raise SpecError(
            f"no trainer {settings.backend!r}", key="trainer.backend", hint=f"there is {', '.join(_BODIES)}"
        )
    topology = {name: getattr(setup, name) for name in ("tp", "pp", "cp", "ep")}
    return RanksConfig(
        python=setup.python or sys.executable,
        ranks=setup.ranks,
        body=body,
        settings=BodySettings(
            model=str(settings.model.absolute()),
            dtype=settings.dtype,
            device="",
            args=setup.args,
            quantize=settings.quantize,
            **topology,
        ),
        devices=tuple(f"cuda:{rank}" if devices else "cpu" for rank in range(setup.ranks)),
        name=settings.name,
        threads=settings.threads,
        socket=str(places.socket),
        meeting=f"file://{places.meeting}",
    )
