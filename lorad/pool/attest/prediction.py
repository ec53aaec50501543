"""What the trainer says of canaries: of a slot, and of the files of a version that no slot holds.

All of it inside `Phases.with_base`.
"""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from msgspec import Struct

from lorad.adapters.adapter import AdapterConfig
from lorad.pool.attest.amplified import Prediction, amplification
from lorad.pool.attest.canaries import Canaries
from lorad.protocol.batch import Batch
from lorad.trainers.base import LoraType, Policy, SlotSpec, Trainer


class Files(Struct, frozen=True):
    """A version on disk: a PEFT directory, and how a slot has to be opened for it."""

    directory: Path
    adapter: AdapterConfig
    lora_type: LoraType = "canonical_lora"


class Predictor:
    """least_sigma: see `Limits`."""

    def __init__(self, trainer: Trainer, least_sigma: float) -> None:
        self._trainer, self._least_sigma = trainer, least_sigma
        self._numbers = itertools.count(1)

    async def plain(self, slot: str | None, canaries: Canaries, times: float = 1.0) -> np.ndarray:
        """float64 [T]; of the base when `slot` is None."""
        return (await self._trainer.logprobs(Policy(slot, times), canaries.batch)).astype(np.float64)

    async def unmet_experts(self, batch: Batch) -> frozenset[str] | None:
        """Return what `Canaries.unmet` is of these texts."""
        found = await self._trainer.unmet_experts(batch)
        return None if found is None else frozenset(found)

    async def amplified(
        self, slot: str, canaries: Canaries, previous: Files | None, begin: float = 1.0
    ) -> Prediction | None:
        """None when the slot changes nothing. previous: the version before; None: the base. begin: an earlier
        K.
        """

        async def score(times: float) -> np.ndarray:
            return await self.plain(slot, canaries, times)

        found = await amplification(score, canaries, max(canaries.sigma, self._least_sigma), begin)
        if found is None:
            return None
        times, now = found
        before = np.zeros_like(now)
        if previous is not None:
            async with self.opened(previous) as other:
                before = await self.plain(other, canaries, times) - canaries.trainer
        return Prediction(canaries, times, now, before)

    @asynccontextmanager
    async def opened(self, files: Files) -> AsyncIterator[str]:
        """A slot with these tensors for a moment.

        Raises AdapterRefused when the trainer does not take them.
        """
        slot = f"attest:{files.directory.name}:{next(self._numbers)}"
        spec = SlotSpec(files.adapter, lora_type=files.lora_type, source=files.directory, frozen=True)
        await self._trainer.open(slot, spec)
        try:
            yield slot
        finally:
            await self._trainer.close(slot)
