"""Tokens a second of sampling against what reading the weights allows; four adapters in a batch; noise."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.gpu_day import torch_place
from benchmarks.gpu_day.stage import Place, play
from benchmarks.gpu_day.torch_place import bandwidth, best_seconds, differences, opened, prompts_for
from benchmarks.kit.ours import Lorad, made
from lorad.engines.base import BASE
from lorad.models.base import Base
from lorad.models.kv import attend_in_part, bytes_per_token
from lorad.protocol.batch import Prompt, Sampling

_ADAPTERS = 4


async def measured(place: Place) -> None:
    speed = bandwidth(place)
    place.say("bandwidth_gb_s", speed / 1e9)
    async with opened(place, place.dense) as held:
        names = [await held.load(f"a@{seed}", seed, place.size.rank) for seed in range(_ADAPTERS)]
        for rows in place.size.rows:
            limit = rows * speed / _bytes_of_a_step(place, held, rows * place.size.prompt, rows)
            place.say(f"rows_{rows}.limit_tokens_per_s", limit)
            for label, version in (("base", BASE), ("adapter", names[0])):
                rate = await torch_place.rollout(place, held, version, rows, place.size.tokens)
                place.say(f"rows_{rows}.{label}_tokens_per_s", rate)
                place.say(f"rows_{rows}.{label}_share_of_limit", rate / limit)
        for rows in place.size.rows[:2]:
            await _shared(place, held, names[0], rows, speed)
        await _noise(place, held, names[1])
        for rows, context in place.size.contexts:
            _attention(place, held.base, rows, context, speed)
        await _mixed(place, held, names)
        await _ragged(place, held, names[0])


def _bytes_of_a_step(place: Place, held: Lorad, prompts: int, rows: int) -> float:
    """Return what decoding a token of each row reads: all weights but the embedding, keys and values of the
    tokens of all prompts, and of what the rows have half way through.
    """
    weights = held.base.nbytes() - held.base.embed.nbytes
    return weights + (prompts + rows * place.size.tokens / 2) * bytes_per_token(held.base)


async def _shared(place: Place, held: Lorad, version: str, rows: int, speed: float) -> None:
    """Measure prompts so long that their samples share keys and values, as GRPO's usually are."""
    size, count = place.size, max(rows // torch_place.GROUP, 1)
    limit = rows * speed / _bytes_of_a_step(place, held, count * size.shared, rows)
    for label, name in (("base", BASE), ("adapter", version)):
        rate = await torch_place.rollout(place, held, name, rows, size.tokens, size.shared)
        place.say(f"shared_{rows}.{label}_tokens_per_s", rate)
        place.say(f"shared_{rows}.{label}_share_of_limit", rate / limit)


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
    """Compare the fused kernel under a mask, which decoding uses on a GPU where rows are many, with the
    products for few of them, as shares of what reading the keys and values once allows.
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
        "products": lambda: attend_in_part(q, keys, values, bias),
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
                    _tokens(held, name, prompts, f"{n} {turn}", place.size.tokens)
                    for n, (name, prompts) in enumerate(calls)
                )
            )
            rate = float(np.sum(tokens)) / (time.perf_counter() - began)
        place.say(f"{label}_tokens_per_s", rate)


async def _ragged(place: Place, held: Lorad, version: str) -> None:
    """Measure completions of four lengths, whose rows leave the batch one after another."""
    rows, lengths = max(place.size.rows[-1] // 4, 1), [place.size.tokens * part // 4 for part in (1, 2, 3, 4)]
    rate = 0.0
    for turn in range(2):
        calls = [(prompts_for(place, held, rows, 30 + n), length) for n, length in enumerate(lengths)]
        began = time.perf_counter()
        tokens = await asyncio.gather(
            *(
                _tokens(held, version, prompts, f"ragged {n} {turn}", length)
                for n, (prompts, length) in enumerate(calls)
            )
        )
        rate = float(np.sum(tokens)) / (time.perf_counter() - began)
    place.say("ragged_tokens_per_s", rate)


async def _tokens(held: Lorad, name: str, prompts: list[Prompt], request: str, tokens: int) -> int:
    return made(await held.complete(name, prompts, Sampling(tokens), request))


def rollout(place: Place) -> None:
    asyncio.run(measured(place))


if __name__ == "__main__":
    play(rollout)
