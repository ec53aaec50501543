"""Asking the pool for tokens of one version, with seeds that a resume does not change."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from lorad.driver.session import Plan
from lorad.errors import LoradError
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.protocol.calls import Generate, Generated
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import Count
from lorad.records.episodes import Task

Seed = Callable[[int], int]
"""From a turn of an episode, from 0, to the seed of its tokens; a completion is the turn 0."""


Ended = Callable[[int, int, list[Chunk]], None]
"""Called with (place of the prompt, index of the sample, its chunks) when a sample has ended."""


def generate(
    pool: Connection, version: str, prompts: list[Prompt], how: Sampling, ended: Ended, count: Count
) -> Generated:
    """Sample by a version, hand over each sample as it ends, and return the pool's summary.

    The id of a prompt is its place, and tokens are counted as they come. Raises LoradError for tokens of
    another version, and where a sample has no end.
    """
    parts: dict[tuple[int, int], list[Chunk]] = {}
    generated = Generated(0, 0, 0.0)
    left = sum(prompt.seeds.size for prompt in prompts)
    for item in pool.stream("generate", Generate(version, prompts, how)):
        if isinstance(item, Generated):
            generated = item
            continue
        if item.version != version:
            raise LoradError(f"tokens of {item.version} came for {version}; nothing was trained on them")
        count.add(tokens=item.tokens.size)
        for chunk in item.split(prompts):
            key = int(chunk.prompt), chunk.index
            chunks = parts.setdefault(key, [])
            chunks.append(chunk)
            if chunk.finish is not None:
                ended(*key, chunks)
                left -= 1
    if left:
        raise LoradError(f"{left} samples of {version} have no end; the engine's log says more")
    return generated


def joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class SampleJob:
    """Completions or episodes to sample, `n` for each example of a plan.

    seed: the number that seeds of tasks and samples are made of.
    """

    plan: Plan
    n: int
    how: Sampling
    seed: int
    is_eval: bool = False

    def count(self) -> Count:
        """Begin to count the samples."""
        return Count("evaluating" if self.is_eval else "sampling", self.n * len(self.plan.examples))

    def seeds(self) -> list[list[Seed]]:
        return seeds_of(self.seed, self.plan, self.n)

    def tasks(self) -> list[Task]:
        """Return the task of each example's episodes."""
        return [Task(e.row, _seed_of(self.seed, 0, e.id, 0)) for e in self.plan.examples]


def seeds_of(run_seed: int, planned: Plan, n: int) -> list[list[Seed]]:
    """Return the seeds of `n` samples of each example; a prompt that comes twice gets other samples."""
    seen: Counter[str] = Counter()
    seeds: list[list[Seed]] = []
    for example in planned.examples:
        first = seen[example.id] * n
        seen[example.id] += 1
        seeds.append([partial(_seed_of, run_seed, planned.step, example.id, first + i) for i in range(n)])
    return seeds


def _seed_of(run_seed: int, step: int, prompt: str, index: int, turn: int = 0) -> int:
    """Return the seed of one turn of one sample, which depends on nothing that a resume changes."""
    text = f"{run_seed}|{step}|{prompt}|{index}" + f"|{turn}" * (turn > 0)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
