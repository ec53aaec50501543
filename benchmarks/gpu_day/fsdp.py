"""The FSDP trainer, whose rank is a process: a gradient, and how its base leaves the device and returns."""

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.gpu_day.sizes import GIB
from benchmarks.gpu_day.stage import Place, play
from benchmarks.gpu_day.torch_place import gradient_seconds, slot_spec, used_gib, work_of
from lorad.protocol.pool_setup import RanksSetup
from lorad.trainers.base import Policy
from lorad.trainers.ranks.remote import RanksSettings, RemoteTrainer

_TURNS = 2  # of leaving and returning: the first makes room on the host


async def measured(place: Place, work: Path) -> None:
    settings = RanksSettings(
        backend="fsdp",
        model=place.dense,
        name="random",
        dtype="bfloat16" if place.has_gpu else "float32",
        devices=(place.device,),
    )
    began = time.perf_counter()
    trainer = await RemoteTrainer.start(RanksSetup(), settings, work=work, logs=work)
    try:
        place.say("start_s", time.perf_counter() - began)
        await _train(place, trainer)
        await _move(place, trainer)
    except BaseException:
        print((work / "trainer.log").read_text()[-2000:], flush=True)
        raise
    finally:
        await trainer.shut_down()


async def _train(place: Place, trainer: RemoteTrainer) -> None:
    size = place.size
    spec = slot_spec([*trainer.modules()], size.rank, size.microbatches[0][0], True)
    await trainer.open("slot", spec)
    work = work_of(place, trainer.capabilities().vocab, max(size.groups // 4, 1))
    seconds = [await gradient_seconds(trainer, "slot", work) for _ in range(2)][-1]
    place.say("train_tokens_per_s", work.tokens / seconds)
    stepped = await trainer.optim_step("slot", 1e-4, 1.0)
    if not stepped.applied or not stepped.grad_norm:
        raise SystemExit(f"the gradient's norm is {stepped.grad_norm}")
    health = await trainer.health()
    if health.memory_peak is not None:
        place.say("peak_gib", health.memory_peak / GIB)


async def _move(place: Place, trainer: RemoteTrainer) -> None:
    """Move the base out and back; it must answer as before."""
    batch = work_of(place, trainer.capabilities().vocab, 1, seed=2).batch
    before = await trainer.logprobs(Policy(), batch)
    for turn in range(_TURNS):
        used, began = used_gib(place) if place.has_gpu else 0.0, time.perf_counter()
        await trainer.offload()
        offload = time.perf_counter() - began
        freed, began = used - used_gib(place) if place.has_gpu else 0.0, time.perf_counter()
        await trainer.onload()
        onload = time.perf_counter() - began
        if turn == _TURNS - 1:
            place.say("offload_s", offload)
            place.say("onload_s", onload)
            if place.has_gpu:
                place.say("offload_frees_gib", freed)
    same = bool(np.array_equal(before, await trainer.logprobs(Policy(), batch)))
    place.say("same_after_onload", same)
    if not same and not place.has_gpu:
        raise SystemExit("the base answers otherwise after it left the device and returned")


def fsdp(place: Place) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measured(place, Path(folder)))


if __name__ == "__main__":
    play(fsdp)
