"""Mixtures of experts: `builtin:tiny-moe` and a larger random one, sampled and trained with adapters on every
expert.
"""

import asyncio
import time
from pathlib import Path

import numpy as np

from benchmarks.gpu_day.stage import Place, play
from benchmarks.gpu_day.torch_place import (
    Work,
    differences,
    gradient_seconds,
    opened,
    prompts_for,
    rms,
    rollout,
    slot_spec,
    work_of,
)
from benchmarks.kit.ours import Lorad
from lorad.engines.base import BASE, AdapterSource
from lorad.models.directory import resolve
from lorad.trainers.base import Policy

_LEARNING_RATE = 1e-2  # of one step, after which the adapter has more effect than rounding
_TOKENS = 32  # of a row: such a step is not captured, and launches kernels for each expert


async def measured(place: Place) -> None:
    for model in (resolve("builtin:tiny-moe"), place.experts):
        async with opened(place, model) as held:
            await _one(place, model, held)


async def _one(place: Place, model: Path, held: Lorad) -> None:
    rank, rows, label = place.size.expert_rank, place.size.rows[1], model.name
    tokens = min(place.size.tokens, _TOKENS)
    version = await held.load("a@0", 0, rank)
    for what, name in (("base", BASE), ("adapter", version)):
        place.say(f"{label}.rollout_{what}_tokens_per_s", await rollout(place, held, name, rows, tokens))
    decode, sides = await differences(held, version, prompts_for(place, held, rows, 7), tokens)
    place.say(f"{label}.decode_against_prefill_nats", decode)
    place.say(f"{label}.trainer_against_engine_nats", sides)
    spec = slot_spec([*held.trainer.modules()], rank, place.size.microbatches[0][0])
    await held.trainer.open("slot", spec)
    work = work_of(place, held.base.config.vocab_size, max(place.size.groups // 4, 1))
    seconds = [await gradient_seconds(held.trainer, "slot", work) for _ in range(2)][-1]
    place.say(f"{label}.train_tokens_per_s", work.tokens / seconds)
    stepped = await held.trainer.optim_step("slot", _LEARNING_RATE, 1.0)
    if not stepped.applied or not stepped.grad_norm:
        raise SystemExit(f"{label}: the gradient's norm is {stepped.grad_norm}")
    await _published(place, label, held, work)


async def _published(place: Place, label: str, held: Lorad, work: Work) -> None:
    """Compare what was trained with the base, in time and effect, and with what the engine makes of it."""
    (base, without), (slot, trained) = [await _logprobs(held, Policy(name), work) for name in (None, "slot")]
    place.say(f"{label}.adapter_times_base", slot / base)
    adapter = await held.trainer.export("slot")
    await held.engine.load("a@1", AdapterSource(adapter.digest(), adapter))
    change, noise = rms(trained - without), rms(trained - await held.engine.score("a@1", work.batch))
    place.say(f"{label}.adapter_changes_nats", change)
    place.say(f"{label}.adapter_trainer_against_engine_nats", noise)
    if noise > change / 2:
        raise SystemExit(f"{label}: the engine serves another adapter than was trained")


async def _logprobs(held: Lorad, policy: Policy, work: Work) -> tuple[float, np.ndarray]:
    """Return how long log-probabilities take, the first time not counted, and what they are."""
    await held.trainer.logprobs(policy, work.batch)
    began = time.perf_counter()
    found = await held.trainer.logprobs(policy, work.batch)
    return time.perf_counter() - began, found


def experts(place: Place) -> None:
    asyncio.run(measured(place))


if __name__ == "__main__":
    play(experts)
