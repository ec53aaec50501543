"""Engines with one fault each: `engine_class: tests.faulty_engines:ServesBase`.

Faults are in the bytes that the engine serves from its third load on; what it says of its versions and every comparison
are left as they are. (`SaysWhatItGot` is honest: it got other bytes.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lorad.adapters.adapter import Adapter
from lorad.engines.base import AdapterSource, LoadedVersion
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.lora import FrozenLora
from lorad.protocol.batch import Chunk, Prompt, Sampling


class Faulty(BuiltinEngine):
    """Serves what `served` makes of an adapter instead of the adapter. faulty_from: the first such load, from 1."""

    faulty_from = 3

    def __init__(self, base: Base, compute: Compute, directory: Path, **options: Any) -> None:
        super().__init__(base, compute, directory, **options)
        self.loads = 0
        self.previous: Adapter | None = None

    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        loaded = await super().load(name, source)
        assert source.adapter is not None
        self.loads += 1
        if self.loads >= self.faulty_from:
            self._versions.table[name].lora = self.served(source.adapter)
        self.previous = source.adapter
        return loaded

    def served(self, adapter: Adapter) -> FrozenLora | None:
        raise NotImplementedError

    def frozen(self, adapter: Adapter, tensors: dict[str, np.ndarray] | None = None, times: float = 1.0) -> FrozenLora:
        return FrozenLora(self._base, tensors or adapter.tensors, times * adapter.config.scale)

    def with_a(self, adapter: Adapter, change: Any) -> FrozenLora:
        """Every A changed, every B as it is."""
        return self.frozen(adapter, {n: change(t) if ".lora_A." in n else t for n, t in adapter.tensors.items()})


class ServesBase(Faulty):
    def served(self, adapter: Adapter) -> None:
        return None


class ServesPrevious(Faulty):
    def served(self, adapter: Adapter) -> FrozenLora:
        assert self.previous is not None
        return self.frozen(self.previous)


class ServesPreviousLate(ServesPrevious):
    """When one step is small beside all the steps before it."""

    faulty_from = 25


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


class ServesNaN(Faulty):
    def served(self, adapter: Adapter) -> FrozenLora:
        lora = self.frozen(adapter)
        for _, b in lora.pairs.values():
            b.fill_(float("nan"))
        return lora


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
            yield chunk if request.startswith("canaries") else msgspec.structs.replace(chunk, version="other@7")


class AnotherBase(BuiltinEngine):
    """Holds a base that is not the trainer's."""

    def __init__(self, base: Base, compute: Compute, directory: Path, **options: Any) -> None:
        super().__init__(replace(base, norm=base.norm * 1.01), compute, directory, **options)
