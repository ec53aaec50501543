"""Tokens a second and peak memory of a gradient, for several micro-batches; what torch keeps afterwards."""

import asyncio
import time

import torch

from tests.benchmarks.gpu_day.sizes import GIB
from tests.benchmarks.gpu_day.stage import Place, play
from tests.benchmarks.gpu_day.torch_place import (
    Work,
    forget_peak,
    gemm,
    gradient_seconds,
    opened,
    peak_gib,
    slot_spec,
    work_of,
)
from tests.benchmarks.kit.ours import Lorad

_FLOPS = 4  # of a parameter and token: two forward, two for the gradient of what went in; weights have none


async def measured(place: Place) -> None:
    best = gemm(place)
    place.say("gemm_tflops", best / 1e12)
    async with opened(place, place.dense) as held:
        vocab = held.base.config.vocab_size
        await _one(place, held, place.size.microbatches[0], work_of(place, vocab, 1), best, say=False)
        work = work_of(place, vocab, place.size.groups, seed=1)
        for microbatch in place.size.microbatches:
            if not await _fits(place, held, microbatch, work, best):
                for slot in held.trainer.slots():
                    await held.trainer.close(slot)
                await held.trainer.relax()
        if place.has_gpu:
            await _kept(place, held)


async def _fits(place: Place, held: Lorad, microbatch: tuple[int, bool], work: Work, best: float) -> bool:
    """Measure a micro-batch. One that is too large is a finding: its error, which holds what it had made, is
    forgotten before anything else is tried.
    """
    try:
        await _one(place, held, microbatch, work, best)
    except torch.OutOfMemoryError as error:
        place.say(f"{_label(microbatch)}.out_of_memory", str(error)[:200])
        return False
    return True


async def _one(
    place: Place, held: Lorad, microbatch: tuple[int, bool], work: Work, best: float, *, say: bool = True
) -> None:
    trainer, label = held.trainer, _label(microbatch)
    await trainer.open("slot", slot_spec([*trainer.modules()], place.size.rank, *microbatch))
    forget_peak(place)
    seconds = await gradient_seconds(trainer, "slot", work)
    began = time.perf_counter()
    stepped = await trainer.optim_step("slot", 1e-5, 1.0)
    optimizer = time.perf_counter() - began
    await trainer.close("slot")
    if not stepped.applied:
        raise SystemExit(f"{label}: the gradient's norm is {stepped.grad_norm}")
    if say:
        rate = work.tokens / seconds
        linears = held.base.config.num_parameters - held.base.embed.numel()
        place.say(f"{label}.tokens_per_s", rate)
        place.say(f"{label}.share_of_gemm", _FLOPS * linears * rate / best)
        place.say(f"{label}.optimizer_s", optimizer)
        place.say(f"{label}.peak_gib", peak_gib(place))


async def _kept(place: Place, held: Lorad) -> None:
    """Say what torch keeps from other processes after training, and after the pool asked it to let go."""
    place.say("reserved_gib", torch.cuda.memory_reserved() / GIB)
    await held.trainer.relax()
    place.say("reserved_after_relax_gib", torch.cuda.memory_reserved() / GIB)
    place.say("allocated_gib", torch.cuda.memory_allocated() / GIB)


def _label(microbatch: tuple[int, bool]) -> str:
    tokens, checkpointing = microbatch
    return f"tokens_{tokens}{'_recomputed' if checkpointing else ''}"


def train(place: Place) -> None:
    asyncio.run(measured(place))


if __name__ == "__main__":
    play(train)
