"""Measure `mixed`: 128 rows of builtin:tiny that decode with 8 adapters of rank 8 or 16 at once.

Against the same rows without any adapter, and against 8 batches of 16 rows, one for each adapter, one after
another. Times are of the decode steps alone: the difference of a long and a short run, as in `decode.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from benchmarks.kit.ours import Lorad, opened, prompts_of
from benchmarks.kit.workload import GROUP, TINY, Figures, Stopwatch, Turn, play, random_ids
from lorad.engines.base import BASE
from lorad.protocol.batch import Sampling

ADAPTERS, ROWS, LENGTH = 8, 128, 8
SHORT, LONG = 8, 72

Way = Callable[[int, int], Awaitable[None]]  # (call, tokens of each sample)


async def one_batch(held: Lorad, versions: Sequence[str], call: int, tokens: int) -> None:
    """All rows at once, an equal share of them for each version."""
    share = ROWS // len(versions)
    ids = random_ids(call, ROWS // GROUP, LENGTH, held.base.config.vocab_size)
    prompts = prompts_of(ids, GROUP, call)
    size = share // GROUP
    parts = [prompts[index * size : (index + 1) * size] for index in range(len(versions))]
    calls = [held.complete(name, part, Sampling(tokens)) for name, part in zip(versions, parts, strict=True)]
    await asyncio.gather(*calls)


async def separate(held: Lorad, versions: Sequence[str], call: int, tokens: int) -> None:
    """A batch for each version, one after another."""
    share = ROWS // len(versions) // GROUP
    for index, name in enumerate(versions):
        ids = random_ids(call + index, share, LENGTH, held.base.config.vocab_size)
        await held.complete(name, prompts_of(ids, GROUP, call + index), Sampling(tokens))


async def measured(turn: Turn, rank: int) -> Figures:
    figures: Figures = {"base": [], "mixed": [], "separate": []}
    async with opened(TINY, mix_calls=True) as held:
        versions = [await held.load(f"bench{number}@1", number, rank) for number in range(ADAPTERS)]
        ways: dict[str, Way] = {
            "base": partial(one_batch, held, [BASE]),
            "mixed": partial(one_batch, held, versions),
            "separate": partial(separate, held, versions),
        }
        for index in range(turn.repeats + 1):
            for place, (name, way) in enumerate(ways.items()):
                call = (turn.call(index) * len(ways) + place) * 2 * ADAPTERS
                figures[name].append(await decode_seconds(way, call))
    return {name: seconds[1:] for name, seconds in figures.items()}


async def decode_seconds(way: Way, call: int) -> float:
    """CPU seconds of the steps by which a long run is longer than a short one."""
    watch = Stopwatch()
    await way(call, SHORT)
    short = watch.lap()
    await way(call + ADAPTERS, LONG)
    return watch.lap() - short


def lorad(turn: Turn, rank: int) -> Figures:
    return asyncio.run(measured(turn, rank))


if __name__ == "__main__":
    play({f"lorad-r{rank}": partial(lorad, rank=rank) for rank in (8, 16)})
