"""Tokens a second of sampling against what reading the weights allows; four adapters in a batch; noise."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from lorad.engines.base import BASE
from lorad.models.base import Base
from lorad.models.kv import attend, bytes_per_token
from lorad.protocol.batch import Prompt, Sampling
from tests.benchmarks.gpu_day import torch_place
from tests.benchmarks.gpu_day.stage import Place, play
from tests.benchmarks.gpu_day.torch_place import bandwidth, best_seconds, differences, opened, prompts_for
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
        for rows, context in place.size.contexts:
            _attention(place, held.base, rows, context, speed)
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


@torch.no_grad()
def _attention(place: Place, base: Base, rows: int, context: int, speed: float) -> None:
    """Compare the fused kernel under a mask, which decoding uses on a GPU, with two products, as shares of
    what reading the keys and values once allows.
    """
    config = base.config
    heads, dim = config.num_key_value_heads, config.head_dim
    shape = rows, heads, config.num_attention_heads // heads, dim
    q = torch.randn(shape, device=place.device, dtype=base.dtype)
    keys, values = torch.randn(2, rows, heads, context, dim, device=place.device, dtype=base.dtype)
    bias = torch.zeros(rows, 1, 1, context, device=place.device, dtype=base.dtype)
    mask = bias.expand(-1, -1, shape[2], -1)
    ways = {
        "fused": lambda: F.scaled_dot_product_attention(q, keys, values, attn_mask=mask),
        "products": lambda: attend(q, keys, values, bias),
    }
    for name, way in ways.items():
        seconds = 2 * keys.nbytes / speed / best_seconds(place, way)
        place.say(f"attention_{rows}_rows_{context}_tokens.{name}_share_of_limit", seconds)


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
