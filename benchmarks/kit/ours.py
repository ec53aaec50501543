"""lorad's side: the builtin trainer and engine in this process, on one base and one compute thread."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.workload import RANK
from lorad.engines.base import AdapterSource
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes
from lorad.models.facts import read_facts
from lorad.models.loading import load_base
from lorad.models.products.choices import measure_products
from lorad.protocol.batch import Prompt, Sampling
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.kit.fakes.random_adapters import random_adapter

ADAPTER_STD = 0.01  # as small as trained adapters are
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Sample = tuple[np.ndarray, np.ndarray]  # int32 tokens, float32 log-probabilities


@dataclass(frozen=True)
class Lorad:
    """What a pool holds, without the pool."""

    base: Base
    trainer: BuiltinTrainer
    engine: BuiltinEngine

    async def load(self, name: str, seed: int, rank: int = RANK) -> str:
        """A random adapter on all linears but the head, loaded under `name`."""
        adapter = random_adapter(linear_shapes(self.base.config), seed, rank, ADAPTER_STD)
        await self.engine.load(name, AdapterSource(adapter.digest(), adapter))
        return name

    async def complete(
        self, version: str, prompts: Sequence[Prompt], sampling: Sampling, request: str = "bench"
    ) -> list[list[Sample]]:
        """The samples of each prompt, in order. Prompts have distinct ids."""
        parts: dict[tuple[str, int], list[Sample]] = {}
        async for chunk in self.engine.generate(request, version, prompts, sampling):
            parts.setdefault((chunk.prompt, chunk.index), []).append((chunk.tokens, chunk.logprobs))
        return [[joined(parts[p.id, index]) for index in range(len(p.seeds))] for p in prompts]


def joined(parts: Sequence[Sample]) -> Sample:
    tokens, logprobs = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(logprobs)


def made(samples: Sequence[Sequence[Sample]]) -> int:
    """How many tokens."""
    return sum(tokens.size for group in samples for tokens, _ in group)


@asynccontextmanager
async def opened(directory: Path, dtype: str = "fp32", **engine: Any) -> AsyncIterator[Lorad]:
    """engine: options of BuiltinEngine. Products have the forms that a pool here measures."""
    measure_products(read_facts(directory).bytes("float32"))
    compute = Compute()
    try:
        base = load_base(directory, DTYPES[dtype], torch.device("cpu"))
        held = Lorad(base, BuiltinTrainer(base, compute), BuiltinEngine(base, compute, directory, **engine))
        yield held
        await held.engine.close()
    finally:
        compute.close()


def prompts_of(ids: Sequence[Sequence[int]] | np.ndarray, samples: int, call: int) -> list[Prompt]:
    """One prompt for each row of ids, with seeds that no other call has."""
    seeds = np.random.default_rng(call).integers(0, 1 << 62, (len(ids), samples)).astype(np.uint64)
    return [Prompt(str(index), np.array(row, np.int32), seeds[index]) for index, row in enumerate(ids)]
