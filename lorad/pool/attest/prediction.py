"""What the trainer says of canaries, by a slot or by the files of a version that no slot holds.

All of it is called inside `Phases.with_base`.
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from lorad.adapters.adapter import AdapterConfig
from lorad.pool.attest.amplified import Prediction, Rerouted, amplification
from lorad.pool.attest.canaries import Canaries
from lorad.protocol.batch import Batch
from lorad.trainers.base import LoraType, Policy, SlotSpec, Trainer


class VersionOnDisk(Struct, frozen=True):
    """A version on disk: a PEFT directory, and how a slot has to be opened for it."""

    directory: Path
    adapter: AdapterConfig
    lora_type: LoraType = "canonical_lora"


class Predictor:
    """Asks the trainer. `Tolerances` explains `least_sigma`."""

    def __init__(self, trainer: Trainer, least_sigma: float) -> None:
        self._trainer = trainer
        self._least_sigma = least_sigma
        self._numbers = itertools.count(1)

    async def logprobs(self, slot: str | None, canaries: Canaries, times: float = 1.0) -> np.ndarray:
        """Return the log-probabilities of a slot, of the base when it is None; float64 [T]."""
        return await self._logprobs(Policy(slot, times), canaries.batch)

    async def unmet_experts(self, batch: Batch) -> frozenset[str] | None:
        """Return what `Canaries.unmet` is of these texts."""
        experts = await self._trainer.unmet_experts(batch)
        return None if experts is None else frozenset(experts)

    async def amplified(
        self, slot: str, canaries: Canaries, previous: VersionOnDisk | None, begin: float = 1.0
    ) -> Prediction | None:
        """Return the prediction; None when the slot changes nothing. The version before is `previous`, None
        for the base, and `begin` an earlier K.
        """
        score = partial(self.logprobs, slot, canaries)
        best = await amplification(score, canaries, max(canaries.sigma, self._least_sigma), begin)
        if best is None:
            return None
        times, now = best
        before = np.zeros_like(now)
        if previous is not None:
            async with self.slot_of(previous) as other:
                before = await self.logprobs(other, canaries, times) - canaries.trainer
        return Prediction(canaries, times, now, before)

    async def with_routes(
        self, slot: str, seen: Rerouted, previous: VersionOnDisk | None
    ) -> list[Prediction]:
        """Predict anew what each server said of an amplified copy, sending each token where that server did.

        The slot holds the version; the one before is `previous`, None for the base.
        """
        prediction = seen.prediction
        canaries = prediction.canaries
        batches = [replace(canaries.batch, routes=said.routes) for said in seen.by_server]
        base = await self._logprobs(Policy(), replace(canaries.batch, routes=canaries.routes))
        now = [await self._logprobs(Policy(slot, prediction.times), batch) for batch in batches]
        before = [np.zeros_like(base) for _ in batches]
        if previous is not None:
            async with self.slot_of(previous) as other:
                before = [
                    await self._logprobs(Policy(other, prediction.times), batch) - base for batch in batches
                ]
        same = replace(canaries, trainer=base)
        pairs = zip(now, before, strict=True)
        return [Prediction(same, prediction.times, *each, is_replayed=True) for each in pairs]

    async def _logprobs(self, policy: Policy, batch: Batch) -> np.ndarray:
        """Return log-probabilities, float64 [T]."""
        return (await self._trainer.logprobs(policy, batch)).astype(np.float64)

    @asynccontextmanager
    async def slot_of(self, files: VersionOnDisk) -> AsyncIterator[str]:
        """Open a slot with these tensors for a moment.

        Raises AdapterRefused when the trainer does not take them.
        """
        slot = f"attest:{files.directory.name}:{next(self._numbers)}"
        spec = SlotSpec(files.adapter, lora_type=files.lora_type, source=files.directory, frozen=True)
        await self._trainer.open(slot, spec)
        try:
            yield slot
        finally:
            await self._trainer.close(slot)
