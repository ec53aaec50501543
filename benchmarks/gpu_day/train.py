"""Tokens a second and peak memory of a gradient, for several micro-batches, and of ragged samples; what
happens where there is no memory for one, and what torch keeps afterwards.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu_day.sizes import GIB
from benchmarks.gpu_day.stage import Place, play
from benchmarks.gpu_day.torch_place import (
    Work,
    forget_peak,
    gemm,
    gradient,
    gradient_seconds,
    opened,
    peak_gib,
    slot_spec,
    work_of,
)
from benchmarks.kit.ours import Lorad
from lorad.models.decoder import hidden
from lorad.trainers.builtin import passes
from lorad.trainers.builtin.trainer import BuiltinTrainer

_FLOPS = 4  # of a parameter and token: two forward, two for the gradient of what went in; weights have none
_RAGGED = 3  # batches of ragged samples: each has lengths that none had before, and the first does not count
_ROOM = 1.6  # times what a micro-batch takes: one of twice its tokens finds no memory
_NOISE = 0.02  # of a gradient's norm, by other micro-batches
_LEAST = GIB  # that a micro-batch takes: a small one does not fill the blocks in which torch has memory


async def measured(place: Place) -> None:
    best = gemm(place)
    place.say("gemm_tflops", best / 1e12)
    async with opened(place, place.dense) as held:
        vocab = held.base.config.vocab_size
        work = work_of(place, vocab, place.size.groups, seed=1)
        for microbatch in place.size.microbatches:
            if not await _fits(place, held, microbatch, work, best):
                for slot in held.trainer.slots():
                    await held.trainer.close(slot)
                await held.trainer.relax()
        await _ragged(place, held)
        await _without_memory(place, held)
        if place.has_gpu:
            await _kept(place, held)


async def _fits(place: Place, held: Lorad, microbatch: tuple[int, bool], work: Work, best: float) -> bool:
    """Measure a micro-batch. One that is too large is a finding: its error, which holds what it had made, is
    forgotten before anything else is tried.
    """
    try:
        await measure(place, held, microbatch, work, best)
    except torch.OutOfMemoryError as error:
        place.say(f"{_label(microbatch)}.out_of_memory", str(error)[:200])
        return False
    return True


async def measure(place: Place, held: Lorad, microbatch: tuple[int, bool], work: Work, best: float) -> None:
    """Measure a gradient and its step, after a smaller one that is not counted. The trainer halves a
    micro-batch for which there is no memory, and goes on: its speed is that of a smaller one, and not said.
    """
    trainer, label = held.trainer, _label(microbatch)
    await trainer.open("slot", slot_spec([*trainer.modules()], place.size.rank, *microbatch))
    forget_peak(place)
    warming = work_of(place, held.base.config.vocab_size, max(place.size.groups // 4, 1), seed=2)
    halved = (await gradient(trainer, "slot", warming))[1].halved_to
    seconds, found = await gradient(trainer, "slot", work)
    halved = found.halved_to or halved
    began = time.perf_counter()
    stepped = await trainer.optim_step("slot", 1e-5, 1.0)
    optimizer = time.perf_counter() - began
    await trainer.close("slot")
    if not stepped.applied:
        raise SystemExit(f"{label}: the gradient's norm is {stepped.grad_norm}")
    if halved:
        place.say(f"{label}.out_of_memory", f"its micro-batches were halved to {halved} tokens")
        return
    rate = work.tokens / seconds
    linears = held.base.config.num_parameters - held.base.embed.numel()
    place.say(f"{label}.tokens_per_s", rate)
    place.say(f"{label}.share_of_gemm", _FLOPS * linears * rate / best)
    place.say(f"{label}.optimizer_s", optimizer)
    place.say(f"{label}.peak_gib", peak_gib(place))


async def _ragged(place: Place, held: Lorad) -> None:
    """Compare a token of samples of many lengths, other ones in each batch, with one of even samples."""
    trainer, vocab, size = held.trainer, held.base.config.vocab_size, place.size
    await trainer.open("slot", slot_spec([*trainer.modules()], size.rank, *size.microbatches[0]))
    groups, costs = max(size.groups // 2, 1), []
    for is_ragged in (False, True):
        spent = tokens = 0.0
        for seed in range(_RAGGED):
            work = work_of(place, vocab, groups, 10 + seed, ragged=is_ragged)
            seconds = await gradient_seconds(trainer, "slot", work)
            stepped = await trainer.optim_step("slot", 1e-5, 1.0)
            if not stepped.applied:
                raise SystemExit(f"{'ragged' if is_ragged else 'even'}: its norm is {stepped.grad_norm}")
            if seed:
                spent, tokens = spent + seconds, tokens + work.tokens
        costs.append(spent / tokens)
    await trainer.close("slot")
    place.say("ragged_tokens_per_s", 1 / costs[1])
    place.say("ragged_times_even", costs[1] / costs[0])


async def _without_memory(place: Place, held: Lorad) -> None:
    """Let a micro-batch find no memory. It must be halved, and its gradient be that of one that fits."""
    trainer, tokens = held.trainer, place.size.microbatches[0][0]
    modules, rank = [*trainer.modules()], place.size.rank
    work = work_of(place, held.base.config.vocab_size, max(place.size.groups // 2, 2), seed=3)
    await trainer.relax()
    forget_peak(place)
    before = torch.cuda.memory_allocated() if place.has_gpu else 0
    await trainer.open("slot", slot_spec(modules, rank, tokens))
    await gradient_seconds(trainer, "slot", work)
    taken = peak_gib(place) * GIB - before
    whole = (await trainer.optim_step("slot", 1e-5, 1.0)).grad_norm
    await trainer.close("slot")
    await trainer.relax()
    await trainer.open("slot", slot_spec(modules, rank, 2 * tokens))
    most = before + _ROOM * taken if place.has_gpu and taken > _LEAST else None
    with little_memory(place, trainer, most, tokens):
        _, found = await gradient(trainer, "slot", work)
    halved = (await trainer.optim_step("slot", 1e-5, 1.0)).grad_norm
    await trainer.close("slot")
    place.say("out_of_memory.halved_to", found.halved_to)
    place.say("out_of_memory.norm_times_whole", halved / whole)
    if found.halved_to != tokens or not abs(halved / whole - 1) < _NOISE:
        raise SystemExit(
            f"without memory: {found.halved_to} tokens at a time, the norm {halved}, not {whole}"
        )


@contextlib.contextmanager
def little_memory(place: Place, trainer: BuiltinTrainer, most: float | None, tokens: int) -> Iterator[None]:
    """Let torch have so many bytes of the GPU. None: let a micro-batch of more than `tokens` fail by itself,
    as on a CPU, where a process without memory is ended.
    """
    if most is not None:
        total = torch.cuda.get_device_properties(place.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), place.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, place.device)
        return

    def limited(base: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if ids.numel() > tokens:
            raise torch.OutOfMemoryError("as if CUDA were out of memory")
        return hidden(base, ids, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "hidden", limited)
        patch.setattr(trainer, "_may_halve", True)
        yield


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
