"""Engines with one fault each: `engine_class: tests.kit.fakes.faulty_engines:ServesBase`.

Faults are in the bytes that the engine serves, or in what a name means, from its third version on; what it
says of its versions and every comparison are left as they are. (`SaysWhatItGot` is honest: it got other
bytes.)
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import numpy as np

from lorad.adapters.adapter import Adapter
from lorad.engines.base import BASE, AdapterSource, EngineCapabilities, LoadedVersion
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.errors import Conflict
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora
from lorad.pool.attest.attester import MARK
from lorad.protocol.batch import Batch, Chunk, Prompt, Sampling


class Faulty(BuiltinEngine):
    """Serves what `served` makes of an adapter instead of the adapter. faulty_from: the first such version,
    from 1.

    in_copies: copies that the pool makes for attestation have the fault as well; it is the loader's, not a
        name's.
    """

    faulty_from = 3
    in_copies = True

    def __init__(self, base: Base, compute: Compute, directory: Path, **options: Any) -> None:
        super().__init__(base, compute, directory, **options)
        self.versions = 0
        self.present: Adapter | None = None
        self.previous: Adapter | None = None

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        loaded = await super().load(name, source)
        assert source.adapter is not None
        is_copy = MARK in name
        if not is_copy:
            self.versions += 1
            self.previous, self.present = self.present, source.adapter
        if self.versions >= self.faulty_from and (self.in_copies or not is_copy):
            self._versions.table[name].lora = self.served(source.adapter)
        return loaded

    def served(self, adapter: Adapter) -> FrozenLora | None:
        raise NotImplementedError

    def frozen(
        self, adapter: Adapter, tensors: dict[str, np.ndarray] | None = None, times: float = 1.0
    ) -> FrozenLora:
        scales = (times * adapter.config.scale, times * adapter.config.scale_of_experts)
        return FrozenLora(self._base, tensors or adapter.tensors, *scales)

    def with_a(self, adapter: Adapter, change: Any) -> FrozenLora:
        """Every A changed, every B as it is."""
        return self.frozen(
            adapter, {n: change(t) if ".lora_A." in n else t for n, t in adapter.tensors.items()}
        )


class ServesBase(Faulty):
    def served(self, adapter: Adapter) -> None:
        return None


class ServesPrevious(Faulty):
    def served(self, adapter: Adapter) -> FrozenLora:
        assert self.previous is not None
        return self.frozen(adapter, dict(self.previous.tensors))


class ServesPreviousLate(ServesPrevious):
    """When one step is small beside all the steps before it."""

    faulty_from = 25


class NameMeansBase(ServesBase):
    """Whatever is loaded is right; the name of a version does not lead there."""

    in_copies = False


class NameMeansPrevious(ServesPrevious):
    in_copies = False


class DoublesScale(Faulty):
    def served(self, adapter: Adapter) -> FrozenLora:
        return self.frozen(adapter, times=2.0)


class DropsTarget(Faulty):
    """The weakest of the targets: q_proj."""

    def served(self, adapter: Adapter) -> FrozenLora:
        return self.frozen(adapter, {n: t for n, t in adapter.tensors.items() if ".q_proj." not in n})


class RollsA(Faulty):
    def served(self, adapter: Adapter) -> FrozenLora:
        return self.with_a(adapter, lambda a: np.roll(a, 1, axis=0))


class TransposesA(Faulty):
    """The right shape, the wrong order of numbers."""

    def served(self, adapter: Adapter) -> FrozenLora:
        return self.with_a(adapter, lambda a: np.ascontiguousarray(a.reshape(a.shape[::-1]).T))


class _OfExperts(Faulty):
    """Serves each pair of an expert's as that of another module, which is of a layer's experts too."""

    def served(self, adapter: Adapter) -> FrozenLora:
        of = {name: self.source(name) if ".experts." in name else name for name in adapter.tensors}
        return self.frozen(adapter, {name: adapter.tensors[of[name]] for name in of if of[name]})

    def source(self, name: str) -> str:
        """Return the name of the tensor to serve; "" for none."""
        raise NotImplementedError


class DropsExpert(_OfExperts):
    """One expert of one layer."""

    def source(self, name: str) -> str:
        return "" if ".layers.1.mlp.experts.3." in name else name


class PermutesExperts(_OfExperts):
    """Two experts of one layer."""

    def source(self, name: str) -> str:
        here, there = ".layers.2.mlp.experts.0.", ".layers.2.mlp.experts.1."
        return name.replace(here, there) if here in name else name.replace(there, here)


class SwapsGateAndUp(_OfExperts):
    def source(self, name: str) -> str:
        here, there = "gate_proj", "up_proj"
        return name.replace(here, there) if here in name else name.replace(there, here)


class ReordersB(Faulty):
    """Each B of an expert as if a file of all experts had them side by side, rank by rank."""

    def served(self, adapter: Adapter) -> FrozenLora:
        tensors = dict(adapter.tensors)
        for name in (n for n in tensors if ".experts.0." in n and ".lora_B." in n):
            names = [n for e in range(4) if (n := name.replace(".experts.0.", f".experts.{e}.")) in tensors]
            side_by_side = np.stack([tensors[n] for n in names], axis=2).reshape(len(tensors[name]), -1)
            parts = np.split(side_by_side, len(names), axis=1)
            tensors |= {n: np.ascontiguousarray(part) for n, part in zip(names, parts, strict=True)}
        return self.frozen(adapter, tensors)


class ServesNaN(Faulty):
    def served(self, adapter: Adapter) -> FrozenLora:
        lora = self.frozen(adapter)
        for _, b in lora.pairs.values():
            b.fill_(float("nan"))
        return lora


class Clean(Faulty):
    def served(self, adapter: Adapter) -> FrozenLora | None:
        return self.frozen(adapter)


class Switched(Clean):
    """Has the fault that a test gives it, in the versions of the run that is newest."""

    fault: ClassVar[type[Faulty]] = Clean
    run = ""

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        self.faulty_from, self.in_copies = self.fault.faulty_from, self.fault.in_copies
        if self.run != (run := name.partition("@")[0]):
            self.run, self.versions, self.present = run, 0, None
        return await super().load(name, source)

    def served(self, adapter: Adapter) -> FrozenLora | None:
        return self.fault.served(self, adapter)


class NeverRepeats(Clean):
    """Each answer is rounded otherwise."""

    noise = 1e-3

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        exact = await super().score(version, batch)
        self._draws = getattr(self, "_draws", 0) + 1
        drawn = np.random.default_rng(self._draws).normal(0, self.noise, exact.size)
        return (exact + drawn).astype(np.float32)

    def capabilities(self) -> EngineCapabilities:
        return msgspec.structs.replace(super().capabilities(), bit_stable=False)


class NeverRepeatsNamesBase(NeverRepeats, NameMeansBase):
    served = NameMeansBase.served


class SecondServerDropsTarget(Clean):
    """Two servers, of which the second has the fault."""

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        loaded = await super().load(name, source)
        assert source.adapter is not None
        self.second = {
            **getattr(self, "second", {}),
            name: DropsTarget.served(cast("Any", self), source.adapter),
        }
        return loaded

    async def scores(self, version: str, batch: Batch) -> Sequence[np.ndarray]:
        right = await self.score(version, batch)
        if version == BASE:
            return [right, right]
        held = self._versions.table[version]
        first, held.lora = held.lora, self.second[version]
        try:
            return [right, await self.score(version, batch)]
        finally:
            held.lora = first


class FailsOnCopies(Clean):
    async def score(self, version: str, batch: Batch) -> np.ndarray:
        if MARK in version and self.versions == 2:
            raise Conflict("there are no copies", hint="")
        return await super().score(version, batch)


class WaitsForScores(Clean):
    """Holds back what it says of versions until a test lets it."""

    gate: threading.Event | None = None

    async def score(self, version: str, batch: Batch) -> np.ndarray:
        if self.gate is not None:
            await asyncio.to_thread(self.gate.wait, 60)
        return await super().score(version, batch)


class HoldsFour(Clean):
    def __init__(self, base: Base, compute: Compute, directory: Path, **options: Any) -> None:
        super().__init__(base, compute, directory, max_versions=4, **options)


class SaysWhatItGot(BuiltinEngine):
    """One number changed on the way; the digest is honestly of what arrived."""

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        assert source.adapter is not None
        tensors = {key: tensor.copy() for key, tensor in source.adapter.tensors.items()}
        next(iter(tensors.values()))[0, 0] += 1.0
        changed = Adapter(source.adapter.config, tensors)
        return await super().load(name, AdapterSource(changed.digest(), adapter=changed))


class Misnames(BuiltinEngine):
    """Says of its tokens that another version made them."""

    async def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request, version, prompts, sampling):
            yield (
                chunk if request.startswith("canaries") else msgspec.structs.replace(chunk, version="other@7")
            )


class ServesUnrounded(BuiltinEngine):
    """Holds the base as its files have it, whatever grid the trainer's is on."""

    def __init__(self, base: Base, compute: Compute, directory: Path, **options: Any) -> None:
        super().__init__(load_base(directory, base.dtype, base.device), compute, directory, **options)


class AnotherBase(BuiltinEngine):
    """Holds a base that is not the trainer's."""

    def __init__(self, base: Base, compute: Compute, directory: Path, **options: Any) -> None:
        super().__init__(replace(base, norm=base.norm * 1.01), compute, directory, **options)
