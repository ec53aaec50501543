"""Torch on the device of a stage: clocks that wait for it, its memory, and what it can do at best."""

import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_day.sizes import GIB
from benchmarks.gpu_day.stage import Place
from benchmarks.kit.ours import Lorad, made, prompts_of
from benchmarks.kit.workload import random_ids
from lorad.adapters.adapter import AdapterConfig
from lorad.engines.base import BASE
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch, Gradients, PolicyLoss, PolicyTargets, Prompt, Sampling
from lorad.trainers.base import Policy, SlotSpec, Trainer
from lorad.trainers.builtin.trainer import BuiltinTrainer

GROUP = 8
_TRIES = 5


def dtype_of(place: Place) -> torch.dtype:
    return torch.bfloat16 if place.has_gpu else torch.float32


def wait_for(place: Place) -> None:
    """Wait until the device has done what it was given."""
    if place.has_gpu:
        torch.cuda.synchronize()


def best_seconds(place: Place, work: Callable[[], object]) -> float:
    """Return the shortest time that the work took on the device, the first not counted."""
    found = []
    for _ in range(_TRIES + 1):
        wait_for(place)
        began = time.perf_counter()
        work()
        wait_for(place)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def bandwidth(place: Place) -> float:
    """Return bytes a second of a copy on the device, what is read and what is written counted each."""
    size = GIB if place.has_gpu else GIB >> 3
    source = torch.zeros(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(place, lambda: target.copy_(source))


def gemm(place: Place) -> float:
    """Return FLOP a second of a square product in the dtype of the base."""
    side = 8192 if place.has_gpu else 512
    left = torch.randn(side, side, device=place.device).to(dtype_of(place))
    return 2.0 * side**3 / best_seconds(place, lambda: left @ left)


def peak_gib(place: Place) -> float:
    """Return the most that was allocated on the GPU since `forget_peak`; on a CPU the most that this process
    ever had.
    """
    if place.has_gpu:
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def forget_peak(place: Place) -> None:
    if place.has_gpu:
        torch.cuda.reset_peak_memory_stats()


def used_gib(place: Place) -> float:
    """Return what all processes together use of the GPU."""
    free, total = torch.cuda.mem_get_info(place.device)
    return (total - free) / GIB


@asynccontextmanager
async def opened(place: Place, model: Path) -> AsyncIterator[Lorad]:
    """Load a base on the device, with the builtin trainer and engine on it."""
    if place.has_gpu:
        torch.cuda.set_device(place.device)
    compute = Compute()
    try:
        began = time.perf_counter()
        base = await compute.run(load_base, model, dtype_of(place), torch.device(place.device))
        await compute.run(wait_for, place)
        place.say(f"{model.name}.load_s", time.perf_counter() - began)
        cache = int(place.size.cache_gib * GIB)
        engine = BuiltinEngine(base, compute, model, cache_bytes=cache)
        yield Lorad(base, BuiltinTrainer(base, compute, str(model)), engine)
        await engine.close()
    finally:
        compute.close()


def prompts_for(place: Place, held: Lorad, rows: int, call: int, length: int = 0) -> list[Prompt]:
    """Make prompts whose samples are `rows` together: eight of each, or all of one. length: of a prompt, else
    that of the size.
    """
    samples = min(rows, GROUP)
    ids = random_ids(call, rows // samples, length or place.size.prompt, held.base.config.vocab_size)
    return prompts_of(ids, samples, call)


async def rollout(place: Place, held: Lorad, version: str, rows: int, tokens: int, length: int = 0) -> float:
    """Return tokens a second of sampling so many tokens in each row once, after once that is not counted.
    length: of prompts, see `prompts_for`.
    """
    rate = 0.0
    for call in range(2):
        prompts = prompts_for(place, held, rows, call, length)
        began = time.perf_counter()
        samples = await held.complete(version, prompts, Sampling(tokens), f"{version} {call}")
        rate = made(samples) / (time.perf_counter() - began)
    return rate


@dataclass(frozen=True)
class Work:
    """A batch for training, with what its loss needs."""

    batch: Batch
    targets: PolicyTargets

    @property
    def tokens(self) -> int:
        return self.batch.completions.size + self.batch.prompts.size


def work_of(place: Place, vocab: int, groups: int, seed: int = 0, *, ragged: bool = False) -> Work:
    """Make a batch of groups. ragged: completions have a quarter to seven quarters of their usual length, and
    one of each group ends 64 tokens after a multiple of 128, where cuDNN's attention made NaN.
    """
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(4, vocab, count).astype(np.int32)

    size = place.size

    def lengths() -> list[int]:
        if not ragged:
            return [size.completion] * GROUP
        usual = size.completion
        odd = usual - (size.prompt + usual) % 128 + 64
        return [max(odd, 64), *rng.integers(usual // 4, usual * 7 // 4 + 1, GROUP - 1).tolist()]

    batch = Batch.of([(tokens(size.prompt), [tokens(n) for n in lengths()]) for _ in range(groups)])
    count = batch.completions.size
    sampled = np.full(count, -8.0, np.float32)
    return Work(batch, PolicyTargets(rng.normal(size=count).astype(np.float32), sampled))


def slot_spec(modules: Sequence[str], rank: int, tokens: int, checkpointing: bool = False) -> SlotSpec:
    targets = tuple(sorted(name for name in modules if name != "lm_head"))
    return SlotSpec(
        AdapterConfig(rank, 2.0 * rank, targets),
        tokens_per_microbatch=tokens,
        activation_checkpointing=checkpointing,
    )


async def gradient_seconds(trainer: Trainer, slot: str, work: Work) -> float:
    """Return how long one gradient takes, which must find memory."""
    seconds, gradients = await gradient(trainer, slot, work)
    if gradients.halved_to:
        raise SystemExit(f"the micro-batches of {slot} were halved to {gradients.halved_to} tokens")
    return seconds


async def gradient(trainer: Trainer, slot: str, work: Work) -> tuple[float, Gradients]:
    """Return how long one gradient takes, and what is said of it. That has been read on the host by then."""
    began = time.perf_counter()
    count = float(work.batch.completions.size)
    found = await trainer.forward_backward(slot, work.batch, work.targets, PolicyLoss(), count)
    return time.perf_counter() - began, found


async def differences(
    held: Lorad, version: str, prompts: Sequence[Prompt], tokens: int
) -> tuple[float, float]:
    """Return two root mean squares of log-probabilities, in nats: what sampling said of a version against
    scoring it again, and the trainer against the engine, both of the base.
    """
    samples = await held.complete(version, prompts, Sampling(tokens), "noise")
    pairs = zip(prompts, samples, strict=True)
    batch = Batch.of([(prompt.tokens, [tokens for tokens, _ in group]) for prompt, group in pairs])
    said = np.concatenate([logprobs for group in samples for _, logprobs in group])
    scored = await held.engine.score(version, batch)
    trainer = await held.trainer.logprobs(Policy(), batch)
    engine = await held.engine.score(BASE, batch)
    return rms(said - scored), rms(trainer - engine)


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))
