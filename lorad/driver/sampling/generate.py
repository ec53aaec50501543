"""Asking the pool for tokens of one version, with seeds that a resume does not change."""

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from lorad.driver.session import Plan
from lorad.errors import LoradError
from lorad.protocol.batch import Chunk, Prompt, Sampling
from lorad.protocol.calls import Generate, Generated
from lorad.protocol.connection import Connection

Seed = Callable[[int], int]
"""From a turn of an episode, from 0, to the seed of its tokens; a completion is the turn 0."""


def generate(
    pool: Connection,
    version: str,
    prompts: list[Prompt],
    how: Sampling,
    ended: Callable[[str, int, list[Chunk]], None] = lambda *_: None,
) -> tuple[dict[tuple[str, int], list[Chunk]], Generated]:
    """Return the chunks of each sample by (id of its prompt, index), and the pool's summary.

    ended: is called with each sample as it ends, in any order.
    Raises LoradError for tokens of another version.
    """
    parts: dict[tuple[str, int], list[Chunk]] = {}
    made = Generated(0, 0, 0.0)
    for item in pool.stream("generate", Generate(version, prompts, how)):
        if isinstance(item, Generated):
            made = item
            continue
        if item.version != version:
            raise LoradError(f"tokens of {item.version} came for {version}; nothing was trained on them")
        for chunk in item.split(prompts):
            chunks = parts.setdefault((chunk.prompt, chunk.index), [])
            chunks.append(chunk)
            if chunk.finish is not None:
                ended(chunk.prompt, chunk.index, chunks)
    return parts, made


def joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def seeds_of(run_seed: int, wanted: Plan, n: int) -> list[list[Seed]]:
    """Return the seeds of `n` samples of each example of a plan.

    A prompt that comes twice in a step gets other samples.
    """
    seen: Counter[str] = Counter()
    found: list[list[Seed]] = []
    for example in wanted.examples:
        first = seen[example.id] * n
        seen[example.id] += 1
        found.append([partial(seed_of, run_seed, wanted.step, example.id, first + i) for i in range(n)])
    return found


def seed_of(run_seed: int, step: int, prompt: str, index: int, turn: int = 0) -> int:
    """Return the seed of one turn of one sample: of nothing that a resume changes."""
    text = f"{run_seed}|{step}|{prompt}|{index}" + f"|{turn}" * (turn > 0)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
