"""Tokens a second of sampling against what reading the weights allows; four adapters in a batch; noise."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from lorad.engines.base import BASE
from lorad.models.kv import bytes_per_token
from lorad.protocol.batch import Prompt, Sampling
from tests.benchmarks.gpu_day import torch_place
from tests.benchmarks.gpu_day.stage import Place, play
from tests.benchmarks.gpu_day.torch_place import bandwidth, differences, opened, prompts_for
from tests.benchmarks.kit.ours import Lorad, made

_ADAPTERS = 4


async def measured(place: Place) -> None:
    speed = bandwidth(place)
    place.say("bandwidth_gb_s", speed / 1e9)
    async with opened(place, place.dense) as held:
        names = [await held.load(f"a@{seed}", seed, place.size.rank) for seed in range(_ADAPTERS)]
        for rows in place.size.rows:
            limit = rows * speed / _bytes_of_a_step(place, held, rows)
            place.say(f"rows_{rows}.limit_tokens_per_s", limit)
            for label, version in (("base", BASE), ("adapter", names[0])):
                rate = await torch_place.rollout(place, held, version, rows, place.size.tokens)
                place.say(f"rows_{rows}.{label}_tokens_per_s", rate)
                place.say(f"rows_{rows}.{label}_share_of_limit", rate / limit)
        await _noise(place, held, names[1])
        await _mixed(place, held, names)


def _bytes_of_a_step(place: Place, held: Lorad, rows: int) -> float:
    """Return what decoding a token of each row reads: all weights but the embedding, and keys and values
    half way through.
    """
    weights = held.base.nbytes() - held.base.embed.nbytes
    return weights + rows * (place.size.prompt + place.size.tokens / 2) * bytes_per_token(held.base)


async def _noise(place: Place, held: Lorad, version: str) -> None:
    prompts = prompts_for(place, held, min(place.size.rows[-1], 32), 7)
    decode, sides = await differences(held, version, prompts, place.size.tokens)
    place.say("decode_against_prefill_nats", decode)
    place.say("trainer_against_engine_nats", sides)
    twice = [await held.complete(version, prompts, Sampling(16), f"seed {n}") for n in range(2)]
    flat = [[tokens.tolist() for group in samples for tokens, _ in group] for samples in twice]
    place.say("same_seeds_same_tokens", flat[0] == flat[1])


async def _mixed(place: Place, held: Lorad, names: Sequence[str]) -> None:
    """Compare rows of four adapters in a batch with as many of one adapter."""
    rows = max(place.size.rows[-1] // len(names), 1)
    for label, versions in (("one_adapter", [names[0]] * len(names)), ("four_adapters", names)):
        rate = 0.0
        for turn in range(2):
            calls = [(name, prompts_for(place, held, rows, 20 + n)) for n, name in enumerate(versions)]
            began = time.perf_counter()
            tokens = await asyncio.gather(
                *(
                    _tokens(place, held, name, prompts, f"{n} {turn}")
                    for n, (name, prompts) in enumerate(calls)
                )
            )
            rate = float(np.sum(tokens)) / (time.perf_counter() - began)
        place.say(f"{label}_tokens_per_s", rate)


async def _tokens(place: Place, held: Lorad, name: str, prompts: list[Prompt], request: str) -> int:
    return made(await held.complete(name, prompts, Sampling(place.size.tokens), request))


def rollout(place: Place) -> None:
    asyncio.run(measured(place))


if __name__ == "__main__":
    play(rollout)
