"""What a pool does: the trainer's work as tokens, seconds and memory, the tokens trained in the last seconds,
and since when nobody has asked it for anything."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import torch

from lorad.models.facts import ModelFacts
from lorad.models.turns import caller
from lorad.protocol.batch import Batch
from lorad.protocol.pool_setup import PoolSetup
from lorad.trainers.base import Trainer, TrainerHealth

_PEAKS: Mapping[str, float] = {
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}
"""Flops per second in dense bf16, from NVIDIA's data sheets. A part of the name that torch tells -> peak."""
_FORWARD = _BACKWARD = 2
"""Flops per parameter of the base and token: y = W x, and the gradient of x. The base needs none of W, which
would be two more (Kaplan et al., 2020, "Scaling laws for neural language models", section 2.1). The adapter
is left out."""
_WINDOW = 10.0  # seconds


def peak_of(name: str) -> float | None:
    """Return the peak FLOP/s of a GPU by torch's name for it, of which the longest known part counts."""
    fitting = [
        part for part in _PEAKS if all(word in name.replace("-", " ").split() for word in part.split())
    ]
    return _PEAKS[max(fitting, key=len)] if fitting else None


class WorkRate(msgspec.Struct, frozen=True):
    """What the trainer's devices can do.

    Attributes:
        parameters: How many parameters of the base one token meets.
        peak: The flops per second of all devices.
    """

    parameters: int
    peak: float

    def share(self, tokens: int, seconds: float, *, recomputes: bool) -> float:
        """Return the model FLOPs utilization: the share of the devices' peak (Chowdhery et al., 2022, PaLM,
        appendix B).

        Unlike there, FLOPs that are computed a second time count too.
        """
        per_token = (_FORWARD + _BACKWARD + (_FORWARD if recomputes else 0)) * self.parameters
        return per_token * tokens / (seconds * self.peak)


def rate_of(config: PoolSetup, dtype: str, facts: ModelFacts) -> WorkRate | None:
    """Return what the trainer's GPUs can do; None for a GPU, dtype or machine of which that is not known."""
    if config.device == "cpu" or config.nodes is not None or dtype != "bfloat16":
        return None
    ranks = config.ranks.ranks if config.ranks is not None else 1
    peak = peak_of(torch.cuda.get_device_name(torch.device(config.device)))
    return None if peak is None else WorkRate(facts.active, ranks * peak)


@dataclass
class _Done:
    """What one run has computed since its last optimizer step."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass
class WorkDone:
    """The trainer's work, for the pool's asyncio loop; `rate` is None where it is unknown."""

    trainer: Trainer
    rate: WorkRate | None
    _done: dict[str, _Done] = field(default_factory=dict)
    _peak: int | None = None  # the most memory since the last step of any run

    @contextmanager
    def measured(self, run: str, batch: Batch) -> Iterator[None]:
        """Count the seconds of a run's forward and backward pass, without the wait for its turn."""
        started = time.perf_counter()
        waited = caller().waited
        yield
        done = self._done.setdefault(run, _Done())
        done.seconds += max(0.0, time.perf_counter() - started - (caller().waited - waited))
        done.tokens += tokens_of(batch)

    def take(self, run: str, *, recomputes: bool) -> tuple[_Done, float | None]:
        """Return what was computed for `run` since the last call, and its share of the devices' peak."""
        done = self._done.pop(run, _Done())
        if self.rate is None or not done.seconds:
            return done, None
        share = self.rate.share(done.tokens, done.seconds, recomputes=recomputes)
        return done, share if math.isfinite(share) else None

    def forget(self, run: str) -> None:
        """Drop what a leaving run computed for a step that never came."""
        self._done.pop(run, None)

    async def take_memory(self) -> tuple[int | None, int | None]:
        """Return the bytes in use now, and the most since the last call; None: unknown."""
        health = await self.health()
        peak = self._peak
        self._peak = None
        return health.memory, peak

    async def health(self) -> TrainerHealth:
        """Return the trainer's health. Its own answer forgets its peak; here it lasts until `take_memory`."""
        health = await self.trainer.health()
        if health.memory_peak is not None:
            self._peak = max(self._peak or 0, health.memory_peak)
        return msgspec.structs.replace(health, memory_peak=self._peak)


def tokens_of(batch: Batch) -> int:
    """Count the tokens of all samples, where each counts its prompt, too."""
    return int((batch.prompt_lengths * batch.group_sizes).sum() + batch.completion_lengths.sum())


class WorkMeter:
    """Counts the use of the pool. All methods belong to the pool's asyncio loop."""

    def __init__(self) -> None:
        self._trained: deque[tuple[float, int]] = deque()
        self._active = 0
        self._last = time.monotonic()
        self.drivers = 0  # connections that runs have open

    @contextmanager
    def activity(self) -> Iterator[None]:
        """Count the call inside the block as use of the pool."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self._last = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        return 0.0 if self._active else time.monotonic() - self._last

    def trained(self, tokens: int) -> None:
        self._trained.append((time.monotonic(), tokens))

    @property
    def trained_per_second(self) -> float:
        since = time.monotonic() - _WINDOW
        while self._trained and self._trained[0][0] < since:
            self._trained.popleft()
        return sum(tokens for _, tokens in self._trained) / _WINDOW
