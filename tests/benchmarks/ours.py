"""lorad's side: the builtin trainer and engine in this process, in the five verbs of a step.

A step is what TRL does in one, and the publishing of the new version; driver, journal and attestation are left out
(`whole.py` has them).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

import lorad
from lorad.adapters.adapter import AdapterConfig
from lorad.engines.base import AdapterSource, Engine
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets, Prompt, Sampling
from lorad.rl.advantage import group_advantages
from lorad.rl.tasks import Problem
from lorad.trainers.base import SlotSpec, Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.benchmarks.workload import (
    ALPHA,
    FORCED_TOKENS,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    RANK,
    TINY,
    WARM_UP,
    Report,
    Stopwatch,
    arguments,
    exact_match,
    problems_of,
)

SLOT = "bench"
EOS = 1

Sample = tuple[np.ndarray, np.ndarray]  # int32 tokens, float32 log-probabilities


class Loop:
    """GRPO on the tiny base, without a driver."""

    def __init__(self, trainer: Trainer, engine: Engine) -> None:
        self.trainer, self.engine = trainer, engine
        self.tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        self.version = 0
        self.report = Report("lorad", lorad.__version__)

    async def open(self) -> None:
        config = AdapterConfig(RANK, ALPHA, tuple(sorted(self.trainer.modules())))
        await self.trainer.open(SLOT, SlotSpec(config))
        await self.publish()

    async def step(self, number: int) -> None:
        watch = Stopwatch()
        problems = problems_of(number)
        prompts = self.prompts(problems, number)
        samples = await self.sample(prompts, Sampling(MAX_NEW_TOKENS, stop_token_ids=(EOS,)))
        self.report.rollout_seconds.append(watch.lap())
        rewards = self.score(problems, samples)
        weights = group_advantages(rewards, np.full(len(prompts), GROUP))
        await self.train(prompts, samples, weights)
        await self.publish()
        self.report.step_seconds.append(self.report.rollout_seconds[-1] + watch.lap())
        self.report.rewards.append(float(rewards.mean()))

    def prompts(self, problems: Sequence[Problem], number: int) -> list[Prompt]:
        ids = [np.array(self.tokenizer.encode(problem.prompt).ids, np.int32) for problem in problems]
        seeds = np.random.default_rng(number).integers(0, 2**63, (len(ids), GROUP), dtype=np.uint64)
        return [Prompt(str(index), ids[index], seeds[index]) for index in range(len(ids))]

    async def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Sample]]:
        """The samples of each prompt, in order."""
        chunks: dict[tuple[int, int], list[Sample]] = {}
        async for chunk in self.engine.generate("bench", f"{SLOT}@{self.version}", prompts, sampling):
            chunks.setdefault((int(chunk.prompt), chunk.index), []).append((chunk.tokens, chunk.logprobs))
        joined = {
            key: tuple(np.concatenate(part) for part in zip(*parts, strict=True)) for key, parts in chunks.items()
        }
        return [[(joined[p, s][0], joined[p, s][1]) for s in range(GROUP)] for p in range(len(prompts))]

    def score(self, problems: Sequence[Problem], samples: list[list[Sample]]) -> np.ndarray:
        texts = self.tokenizer.decode_batch([tokens.tolist() for group in samples for tokens, _ in group])
        answers = [problem.answer for problem in problems for _ in range(GROUP)]
        return np.array(exact_match(texts, answers), np.float32)

    async def train(self, prompts: Sequence[Prompt], samples: list[list[Sample]], weights: np.ndarray) -> None:
        """Groups whose rewards are all equal have no gradient and are left out, as in a run."""
        kept = [p for p in range(len(prompts)) if weights[p * GROUP : (p + 1) * GROUP].any()]
        total = sum(tokens.size for group in samples for tokens, _ in group)
        batch = Batch.of([(prompts[p].tokens, [tokens for tokens, _ in samples[p]]) for p in kept])
        targets = PolicyTargets(
            advantages=np.concatenate([weights[p * GROUP : (p + 1) * GROUP] for p in kept]),
            sampler_logprobs=np.concatenate([logprobs for p in kept for _, logprobs in samples[p]]),
        )
        await self.trainer.forward_backward(SLOT, batch, targets, PolicyLoss(), float(total))
        await self.trainer.optim_step(SLOT, LEARNING_RATE, 1.0)

    async def publish(self) -> None:
        adapter = await self.trainer.export(SLOT)
        await self.engine.load(f"{SLOT}@{self.version + 1}", AdapterSource(adapter.digest(), adapter))
        if self.version:
            await self.engine.unload(f"{SLOT}@{self.version}")
        self.version += 1


async def opened(compute: Compute) -> Loop:
    """The loop on a base that trainer and engine share, its first version published."""
    base = load_base(TINY, torch.float32, torch.device("cpu"))
    loop = Loop(BuiltinTrainer(base, compute), BuiltinEngine(base, compute, TINY))
    await loop.open()
    return loop


async def steps(count: int, compute: Compute) -> Report:
    """`count` GRPO steps."""
    loop = await opened(compute)
    for number in range(count + WARM_UP):
        await loop.step(number)
    del loop.report.step_seconds[:WARM_UP], loop.report.rollout_seconds[:WARM_UP]
    return loop.report


async def rollout(count: int, compute: Compute) -> Report:
    """`count` calls of generate: 128 sequences of `FORCED_TOKENS` tokens with the adapter active."""
    loop = await opened(compute)
    for call in range(count + WARM_UP):
        prompts = loop.prompts(problems_of(call), call)
        watch = Stopwatch()
        samples = await loop.sample(prompts, Sampling(FORCED_TOKENS))
        seconds = watch.lap()
        made = sum(tokens.size for group in samples for tokens, _ in group)
        assert made == len(prompts) * GROUP * FORCED_TOKENS, f"{made} tokens were made"
        loop.report.tokens_per_second.append(made / seconds)
    del loop.report.tokens_per_second[:WARM_UP]
    return loop.report


def main() -> None:
    measure, count = arguments()
    compute = Compute()
    try:
        asyncio.run({"step": steps, "rollout": rollout}[measure](count, compute)).print()
    finally:
        compute.close()


if __name__ == "__main__":
    main()
