"""lorad's GRPO loop without driver, journal and attestation: what TRL does in one step, and publishing the
version.
"""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from benchmarks.kit.ours import Lorad, Sample, made, prompts_of
from benchmarks.kit.workload import (
    ALPHA,
    EOS,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    RANK,
    TINY,
    Figures,
    Stopwatch,
    exact_match,
    problems_of,
)
from lorad.adapters.adapter import AdapterConfig
from lorad.engines.base import AdapterSource
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets, Prompt, Sampling
from lorad.rl.advantage import advantages
from lorad.rl.tasks import Problem
from lorad.trainers.base import SlotSpec

SLOT = "bench"


class Loop:
    """GRPO on the tiny base. figures: CPU seconds of each step and of its rollout, and its mean reward."""

    def __init__(self, lorad: Lorad, seed: int = 0) -> None:
        self.lorad, self.seed = lorad, seed
        self.tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        self.version = 0
        self.figures: Figures = {"step": [], "rollout": [], "reward": []}

    async def open(self) -> None:
        modules = tuple(sorted(name for name in self.lorad.trainer.modules() if name != "lm_head"))
        await self.lorad.trainer.open(SLOT, SlotSpec(AdapterConfig(RANK, ALPHA, modules), seed=self.seed))
        await self.publish()

    async def step(self, number: int) -> None:
        """number: of the step's data; no two steps may share it."""
        watch = Stopwatch()
        problems = problems_of(number)
        prompts = self.prompts(problems, GROUP, number)
        sampling = Sampling(MAX_NEW_TOKENS, stop_token_ids=(EOS,))
        samples = await self.lorad.complete(f"{SLOT}@{self.version}", prompts, sampling)
        rollout = watch.lap()
        rewards = self.score(problems, samples)
        weights = advantages(rewards, np.full(len(prompts), GROUP))
        await self.train(prompts, samples, weights)
        await self.publish()
        self.figures["rollout"].append(rollout)
        self.figures["step"].append(rollout + watch.lap())
        self.figures["reward"].append(float(rewards.mean()))

    async def greedy(self, problems: Sequence[Problem]) -> float:
        """Exact match of the current version on held-out problems."""
        sampling = Sampling(MAX_NEW_TOKENS, temperature=0.0, stop_token_ids=(EOS,))
        prompts = self.prompts(problems, 1, 0)
        samples = await self.lorad.complete(f"{SLOT}@{self.version}", prompts, sampling)
        return float(self.score(problems, samples).mean())

    def prompts(self, problems: Sequence[Problem], samples: int, number: int) -> list[Prompt]:
        ids = [self.tokenizer.encode(problem.prompt).ids for problem in problems]
        return prompts_of(ids, samples, number + 1_000_003 * self.seed)

    def score(self, problems: Sequence[Problem], samples: list[list[Sample]]) -> np.ndarray:
        texts = self.tokenizer.decode_batch([tokens.tolist() for group in samples for tokens, _ in group])
        pairs = zip(problems, samples, strict=True)
        return np.array(
            exact_match(texts, [problem.answer for problem, group in pairs for _ in group]), np.float32
        )

    async def train(
        self, prompts: Sequence[Prompt], samples: list[list[Sample]], weights: np.ndarray
    ) -> None:
        """Groups whose rewards are all equal have no gradient and are left out, as in a run."""
        kept = [p for p in range(len(prompts)) if weights[p * GROUP : (p + 1) * GROUP].any()]
        if kept:
            batch = Batch.of([(prompts[p].tokens, [tokens for tokens, _ in samples[p]]) for p in kept])
            each = np.concatenate([weights[p * GROUP : (p + 1) * GROUP] for p in kept])
            targets = PolicyTargets(
                advantages=np.repeat(each, batch.completion_lengths),
                sampler_logprobs=np.concatenate([logprobs for p in kept for _, logprobs in samples[p]]),
            )
            await self.lorad.trainer.forward_backward(
                SLOT, batch, targets, PolicyLoss(), float(made(samples))
            )
        await self.lorad.trainer.optim_step(SLOT, LEARNING_RATE, 1.0)

    async def publish(self) -> None:
        adapter = await self.lorad.trainer.export(SLOT)
        await self.lorad.engine.load(f"{SLOT}@{self.version + 1}", AdapterSource(adapter.digest(), adapter))
        if self.version:
            await self.lorad.engine.unload(f"{SLOT}@{self.version}")
        self.version += 1
