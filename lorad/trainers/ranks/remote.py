"""A trainer whose ranks are processes of their own: the trainer protocol in the pool."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
from msgspec import Struct

from lorad.adapters.adapter import Adapter
from lorad.children.host import Host
from lorad.errors import SpecError
from lorad.protocol.batch import (
    Batch,
    Gradients,
    LossStats,
    Optimizer,
    PolicyLoss,
    PolicyTargets,
    Predictions,
    ValueLoss,
    ValueTargets,
)
from lorad.protocol.pool_setup import Quantize, RanksSetup
from lorad.trainers.base import (
    GradientWork,
    Policy,
    SlotInfo,
    SlotSpec,
    StepResult,
    Trainer,
    TrainerCapabilities,
    TrainerHealth,
    check_batch,
    check_values,
    check_work,
)
from lorad.trainers.ranks import calls
from lorad.trainers.ranks.config import Places, RanksConfig
from lorad.trainers.ranks.processes import Processes
from lorad.trainers.ranks.spread import Spread
from lorad.trainers.sharded.body import BodySettings

T = TypeVar("T")

_BODIES = {
    "fsdp": "lorad.trainers.fsdp.body:open_body",
    "megatron": "lorad.trainers.megatron.body:open_body",
}


class RanksSettings(Struct, frozen=True, kw_only=True):
    """What the pool decides. model: a directory; name: what adapters' configurations call it. devices: `cpu`,
    or one `cuda:<n>` for each rank, counted among those that the pool sees. threads: of each rank. body:
    replaces what the backend means, as `module:function`; `RanksSetup.env` may name its place in PYTHONPATH.
    hang: seconds without a heartbeat after which a rank is hung. quantize: see `BodySettings`.
    """

    backend: str
    model: Path
    name: str
    dtype: Literal["float32", "bfloat16"]
    devices: tuple[str, ...] = ("cpu",)
    threads: int = 1
    body: str | None = None
    hang: float = 120.0
    quantize: Quantize | None = None


class RemoteTrainer(Trainer):
    """Made by `start`."""

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

        work: an existing directory, the same in each life of the pool, for what the next life has to clear
        away. logs: where `trainer.log` goes. hosts: other machines, which have all ranks.

        Raises what a rank says of settings that it does not take (SpecError, …), and PoolLost with the log's
        word for what ended it.
        """
        places = Places(work, logs)
        config = _config(setup, settings, places)
        spread = Spread(hosts, setup) if hosts else None
        # lorad's own interpreter may have what the ranks import by the pool's PYTHONPATH alone
        own = {} if setup.python else {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        environment = places.environment({**own, **setup.env}, settings.devices, settings.threads)
        processes = Processes(config, places, environment, settings.hang, spread)
        try:
            ready = await processes.start()
        except BaseException:
            await processes.end()
            raise
        return cls(processes, ready, spread)

    def __init__(self, processes: Processes, ready: calls.Ready, spread: Spread | None) -> None:
        self._processes, self._ready, self._spread = processes, ready, spread
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

    async def base_checksum(self) -> str:
        found: str = await self._processes.ask(calls.BaseChecksum())
        return found

    async def open(self, slot: str, spec: SlotSpec) -> SlotInfo:
        info: SlotInfo = await self._to_its_end(self._opened(slot, spec))
        return info

    async def _opened(self, slot: str, spec: SlotSpec) -> SlotInfo:
        async with self._readable(spec.source) as source:
            info: SlotInfo = await self._processes.ask(
                calls.Open.of(slot, spec, source), lambda: self._slots.setdefault(slot)
            )
        return info

    async def forward_backward(
        self, slot: str, batch: Batch, targets: PolicyTargets, loss: PolicyLoss, normaliser: float
    ) -> Gradients:
        check_work([GradientWork(slot, batch, targets, loss, normaliser)], self.slots(), self.capabilities())
        call = calls.ForwardBackward(slot, batch, targets, loss, normaliser)
        found: Gradients = await self._processes.ask(call)
        return found

    async def optim_step(
        self, slot: str, lr: float, max_grad_norm: float, optimizer: Optimizer | None = None
    ) -> StepResult:
        result: StepResult = await self._processes.ask(calls.OptimStep(slot, lr, max_grad_norm, optimizer))
        return result

    async def discard_grads(self, slot: str) -> None:
        await self._processes.ask(calls.DiscardGrads(slot))

    async def predictions(self, policy: Policy, batch: Batch, temperature: float = 1.0) -> Predictions:
        check_batch(batch, self.capabilities(), temperature)
        found: Predictions = await self._processes.ask(calls.Predict(policy, batch, temperature))
        return found

    async def unmet_experts(self, batch: Batch) -> list[str] | None:
        check_batch(batch, self.capabilities(), 1.0)
        found: list[str] | None = await self._processes.ask(calls.UnmetExperts(batch))
        return found

    async def values(self, slot: str, batch: Batch) -> np.ndarray:
        check_batch(batch, self.capabilities(), 1.0)
        found: np.ndarray = await self._processes.ask(calls.Values(slot, batch))
        return found

    async def value_backward(
        self, slot: str, batch: Batch, targets: ValueTargets, loss: ValueLoss, normaliser: float
    ) -> LossStats:
        check_values(batch, targets, loss, normaliser, self.capabilities())
        call = calls.ValueBackward(slot, batch, targets, loss, normaliser)
        stats: LossStats = await self._processes.ask(call)
        return stats

    async def export(self, slot: str) -> Adapter:
        adapter: Adapter = await self._processes.ask(calls.Export(slot))
        for tensor in adapter.tensors.values():
            tensor.flags.writeable = False
        return adapter

    async def save(self, slot: str, directory: Path) -> list[str]:
        return await self._to_its_end(self._saved(slot, directory))

    async def _saved(self, slot: str, directory: Path) -> list[str]:
        async with self._writable(directory) as path:
            files: list[str] = await self._processes.ask(calls.Save(slot, path))
        return files

    async def load(self, slot: str, directory: Path) -> None:
        await self._to_its_end(self._loaded(slot, directory))

    async def _loaded(self, slot: str, directory: Path) -> None:
        async with self._readable(directory) as path:
            await self._processes.ask(calls.Load(slot, str(path)))

    async def offload(self) -> None:
        await self._processes.ask(calls.Offload())

    async def onload(self) -> None:
        await self._processes.ask(calls.Onload())

    async def close(self, slot: str) -> None:
        await self._processes.ask(calls.Close(slot), lambda: self._slots.pop(slot))

    async def health(self) -> TrainerHealth:
        """The memory is that of the last call."""
        processes = self._processes
        if why := processes.why:
            return TrainerHealth(alive=False, detail=why)
        peak, processes.peak = processes.peak, processes.memory
        return TrainerHealth(memory=processes.memory, memory_peak=peak)

    async def shut_down(self) -> None:
        await self._processes.end()

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the outcome of a call with files. On other machines they stay until it has ended, also when
        the caller is cancelled.
        """
        if self._spread is None:
            return await work
        task = asyncio.create_task(work)
        self._with_files.add(task)
        task.add_done_callback(self._with_files.discard)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def _readable(self, directory: Path | None) -> AsyncIterator[str | None]:
        """Yield the path by which all ranks find a directory's files."""
        if directory is None or self._spread is None:
            yield None if directory is None else calls.text(directory)
        else:
            async with self._spread.put(directory) as path:
                yield path

    @asynccontextmanager
    async def _writable(self, directory: Path) -> AsyncIterator[str]:
        """Yield the path by which rank 0 puts files into a directory."""
        if self._spread is None:
            yield calls.text(directory)
        else:
            async with self._spread.fetched(directory) as path:
                yield path


def _config(setup: RanksSetup, settings: RanksSettings, places: Places) -> RanksConfig:
    """Raises SpecError when ranks and devices do not fit, or nobody knows the backend."""
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
            model=calls.text(settings.model),
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
