"""Engines that can sleep, and what goes wrong with them:
`engine_class: tests.kit.fakes.sleeping_engines:Sleeps`.

They are the builtin engine, which gives nothing back; what is asked of them in their sleep is an error.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from lorad.engines.base import AdapterSource, EngineCapabilities, EngineHealth, LoadedVersion, Scorer
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.engines.remote.dialect import ServerSettings
from lorad.errors import PoolLost
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import resolve
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora
from lorad.models.merge import Merger
from lorad.pool.attest.attester import MARK
from lorad.protocol.batch import (
    Batch,
    Chunk,
    Gradients,
    Optimizer,
    PolicyLoss,
    PolicyTargets,
    Prompt,
    Sampling,
)
from lorad.protocol.calls import StepResult
from lorad.protocol.pool_setup import ServerSetup
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.kit.fakes.random_adapters import Shapes

TINY = resolve("builtin:tiny")


class Sleeps(BuiltinEngine):
    """changes: its sleeps and wakes so far. fails: what the next sleep or wake raises instead of coming to
    be.
    """

    newest: "Sleeps"

    def __init__(self, base: Base, compute: Compute, directory: Path, **options: Any) -> None:
        super().__init__(base, compute, directory, **options)
        self.changes: list[str] = []
        self.fails: Exception | None = None
        self.busy = 0
        self._check: Callable[[Scorer], Awaitable[None]] | None = None
        Sleeps.newest = self

    @property
    def is_asleep(self) -> bool:
        return self.changes[-1:] == ["sleep"]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        assert not self.is_asleep
        self.busy += 1
        try:
            yield
        finally:
            assert not self.is_asleep
            self.busy -= 1

    def capabilities(self) -> EngineCapabilities:
        return msgspec.structs.replace(super().capabilities(), sleep=True)

    def on_return(self, check: Callable[[Scorer], Awaitable[None]]) -> None:
        self._check = check

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        with self.awake():
            return await super().load(name, source)

    async def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        chunks = cast("Any", super().generate(request, version, prompts, sampling))
        with self.awake():
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        with self.awake():
            return await super().score(version, batch)

    async def score_in_sleep(self, version: str, batch: Batch) -> np.ndarray:
        """Score even while asleep, for those who check whether it can be woken."""
        return await super().score(version, batch)

    async def sleep(self) -> None:
        await self.drain()
        assert not self.busy
        self._change("sleep")

    async def wake(self) -> None:
        if len(self._versions.table) == 2:
            self.altered()
        if self._check is not None:
            await self._check(self.score_in_sleep)
        self._change("wake")

    def _change(self, what: str) -> None:
        error, self.fails = self.fails, None
        if error is not None:
            raise error
        self.changes.append(what)

    def altered(self) -> None:
        """What a sleep does to it, once it holds two versions."""

    async def health(self) -> EngineHealth:
        return msgspec.structs.replace(await super().health(), asleep=self.is_asleep)


class TrainsAlone(BuiltinTrainer):
    """Will not work on a gradient while the engine is awake."""

    async def forward_backward(
        self, slot: str, batch: Batch, targets: PolicyTargets, loss: PolicyLoss, normaliser: float
    ) -> Gradients:
        assert Sleeps.newest.is_asleep
        stats = await super().forward_backward(slot, batch, targets, loss, normaliser)
        assert Sleeps.newest.is_asleep
        return stats

    async def optim_step(
        self, slot: str, lr: float, max_grad_norm: float, optimizer: Optimizer | None = None
    ) -> StepResult:
        assert Sleeps.newest.is_asleep
        return await super().optim_step(slot, lr, max_grad_norm, optimizer)


class WakesWithBase(Sleeps):
    """Its newest version has become the base."""

    def altered(self) -> None:
        _, newest = self._versions.table.values()
        newest.lora = None


class WakesWithPrevious(Sleeps):
    """Its newest version has become the one before."""

    def altered(self) -> None:
        previous, newest = self._versions.table.values()
        newest.lora = previous.lora


class WakesWithNaN(Sleeps):
    def altered(self) -> None:
        _, newest = self._versions.table.values()
        assert isinstance(newest.lora, FrozenLora)
        for _, b in newest.lora.pairs.values():
            b.fill_(float("nan"))
        self._models.forget(newest.lora)


class WakesWithAnotherBase(Sleeps):
    def altered(self) -> None:
        self._models = Merger(replace(self._base, norm=self._base.norm * 1.01))


class WakesWithOtherRounding(Sleeps):
    """After each sleep another, as that of kernels which add in another order."""

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        return self._rounded(await super().score(version, batch))

    async def score_in_sleep(self, version: str, batch: Batch) -> np.ndarray:
        return self._rounded(await super().score_in_sleep(version, batch))

    def _rounded(self, exact: np.ndarray) -> np.ndarray:
        return exact * np.float32(1 + 1e-6 * self.changes.count("sleep"))


class RestartsWithOtherRounding(WakesWithOtherRounding):
    """Before its third version comes."""

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        if name.endswith("@2"):
            self.changes += ["sleep", "wake"]
            assert self._check is not None
            await self._check(self.score_in_sleep)
        return await super().load(name, source)


class SecondServerLags(BuiltinEngine):
    """Two servers, of which the second holds of each version what the one before it is."""

    async def scores(self, version: str, batch: Batch) -> Sequence[np.ndarray]:
        names = ["base", *self._versions.table]
        before = names[max(0, names.index(version) - 1)]
        return [await self.score(version, batch), await self.score(before, batch)]


class SecondServerHasAnotherBase(BuiltinEngine):
    async def scores(self, version: str, batch: Batch) -> Sequence[np.ndarray]:
        right = await self.score(version, batch)
        return [right, right + np.linspace(-0.01, 0.01, right.size, dtype=np.float32)]


class Dies(BuiltinEngine):
    """At its third load, for good."""

    death: PoolLost | None = None

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        if sum(MARK not in held for held in self._versions.table) == 2 and MARK not in name:
            self.death = PoolLost("server 0 died 5 times: out of memory", hint="Resume the run.")
            raise self.death
        return await super().load(name, source)

    async def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        if self.death is not None:
            raise self.death
        async for chunk in super().generate(request, version, prompts, sampling):
            yield chunk

    async def health(self) -> EngineHealth:
        return msgspec.structs.replace(
            await super().health(), alive=self.death is None, detail=str(self.death) if self.death else ""
        )


class Served(Sleeps):
    """An engine with a base of its own, opened as one of servers is.

    told: the arguments that it was opened with.
    left: opens without a close.
    """

    told: dict[str, Any]
    opens, left = 0, 0

    @classmethod
    async def open(
        cls, setup: ServerSetup, settings: ServerSettings, shapes: Shapes, **told: Any
    ) -> "Served":
        compute = Compute()
        Served.opens, Served.left = Served.opens + 1, Served.left + 1
        try:
            base = await compute.run(load_base, TINY, torch.float32, torch.device("cpu"))
            engine = cls(base, compute, TINY)
        except BaseException:
            cls._ended(compute)
            raise
        engine.told = {"setup": setup, "settings": settings, "shapes": shapes, **told}
        return engine

    def software(self) -> dict[str, str]:
        return {"sglang": "0.5.23"}

    async def close(self) -> None:
        await super().close()
        self._ended(self._compute)

    @staticmethod
    def _ended(compute: Compute) -> None:
        Served.left -= 1
        compute.close()
