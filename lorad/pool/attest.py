"""Attestation: whether the engine, asked for a version, serves exactly the adapter that the trainer exported.

*Delivery*: the digest of what the engine received. *Direct comparison* (judge.py), which every server of the engine has
to pass. What the first one said then is kept: a part of the engine that has lost its memory (restart, wake) is compared
with it in the same way before anybody is served by that part. This proves "the same as was attested", within the same
limits; of versions that were only ever served, "the same as when it was loaded".
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from lorad.engines.base import BASE, Engine, Scorer
from lorad.errors import AttestationFailed, NotFound
from lorad.pool.canaries import Canaries, measure_canaries, sample_canaries
from lorad.pool.judge import BFLOAT16, FLOAT32, Reference, judge, judge_again, worst
from lorad.pool.phases import Phases
from lorad.protocol.calls import CANARIES, CANARY_TOKENS, Attestation
from lorad.trainers.base import Policy, Trainer

log = logging.getLogger(__name__)

UNLOADED = "It was unloaded and nothing was sampled from it; the log of the engine tells what it did."


class Attester:
    """Attests on one engine and trainer; canaries are made once for each (count, tokens).

    What needs the engine awake, or the trainer's base on its devices, takes its turn in `phases` where it says nothing
    else.
    """

    def __init__(self, engine: Engine, trainer: Trainer, vocab_size: int, phases: Phases) -> None:
        self._engine, self._trainer, self._vocab_size, self._phases = engine, trainer, vocab_size, phases
        dtypes = {engine.capabilities().dtype, trainer.capabilities().dtype}
        self.limits = FLOAT32 if dtypes == {"float32"} else BFLOAT16
        self._canaries: dict[tuple[int, int], Canaries] = {}
        self._sampling = asyncio.Lock()
        self._references: dict[str, Reference] = {}  # by the engine's name
        engine.on_return(self.check)

    def has_canaries(self, count: int, tokens: int) -> bool:
        return (count, tokens) in self._canaries

    async def canaries(self, count: int, tokens: int, run: str = "") -> Canaries:
        """Raises AttestationFailed when engine and trainer do not hold the same base.

        The engine says last what it makes of them, so that from then on whatever returns is compared with that.
        """
        async with self._sampling:
            if not self.has_canaries(count, tokens):
                async with self._phases.serving(run):
                    batch = await sample_canaries(self._engine, self._vocab_size, count, tokens)
                async with self._phases.with_base(run):
                    trainer = await self._trainer.logprobs(Policy(), batch)
                async with self._phases.serving(run), self._engine.settled():
                    self._canaries[count, tokens] = await measure_canaries(self._engine, trainer, batch)
        return self._canaries[count, tokens]

    async def any_canaries(self) -> Canaries:
        """As `canaries`, of whatever size: those that there are, if there are any."""
        return await self.canaries(*next(iter(self._canaries), (CANARIES, CANARY_TOKENS)))

    async def of_slot(self, slot: str, canaries: Canaries) -> np.ndarray:
        """What the trainer makes of the canaries, float64 [T]. Inside `Phases.with_base`."""
        return (await self._trainer.logprobs(Policy(slot), canaries.batch)).astype(np.float64)

    async def attest(
        self, name: str, digest: str, trainer: np.ndarray, canaries: Canaries, previous: np.ndarray | None
    ) -> tuple[Attestation, np.ndarray]:
        """Whether `name` is what the slot holds, and its dt. trainer: see `of_slot`. previous: dt(v-1); None: the base.

        To be called inside the same `Engine.settled` as the load.
        """
        change = trainer - canaries.trainer
        if (missing := await self.delivery(name, digest)) is not None:
            return missing, change
        before = np.zeros_like(change) if previous is None else previous
        by_server = await self._scores(name, canaries)
        verdict = worst([judge(canaries, engine, trainer, before, self.limits) for engine in by_server])
        if verdict.verdict != "failed":
            self._references[name] = Reference(canaries, by_server[0], before)
        return verdict, change

    async def remember(self, name: str, canaries: Canaries) -> None:
        """Have a version that no slot holds compared with what it says now, from now on. Inside `Engine.settled`.

        Raises AttestationFailed when servers differ about it.
        """
        if name in self._references:
            return
        by_server = await self._scores(name, canaries)
        reference = Reference(canaries, by_server[0], np.zeros_like(by_server[0]))
        verdict = worst([judge_again(reference, engine, canaries.engine, self.limits) for engine in by_server])
        if verdict.verdict == "failed":
            raise AttestationFailed(f"{name} is not the same everywhere: {verdict.detail}", hint=UNLOADED)
        self._references[name] = reference

    def forget(self, name: str) -> None:
        """It is not to be served any more."""
        self._references.pop(name, None)

    async def check(self, score: Scorer) -> None:
        """Raises AttestationFailed unless `score` says of the base and of every version what the engine said before."""
        for canaries in list(self._canaries.values()):
            base = (await score(BASE, canaries.batch)).astype(np.float64)
            then = Reference(canaries, canaries.engine, np.zeros_like(base))
            _must_pass(BASE, judge_again(then, base, canaries.engine, self.limits))
            for name, reference in list(self._references.items()):
                if reference.canaries is canaries:
                    await self._check_version(name, reference, base, score)

    async def _check_version(self, name: str, reference: Reference, base: np.ndarray, score: Scorer) -> None:
        try:
            now = (await score(name, reference.canaries.batch)).astype(np.float64)
        except NotFound:
            if name in self._references:
                raise
            return
        _must_pass(name, judge_again(reference, now, base, self.limits))

    async def _scores(self, name: str, canaries: Canaries) -> list[np.ndarray]:
        return [scores.astype(np.float64) for scores in await self._engine.scores(name, canaries.batch)]

    async def delivery(self, name: str, digest: str) -> Attestation | None:
        """None when the engine says that it holds `digest` under `name`."""
        held = {version.name: version.digest for version in await self._engine.loaded()}
        if name not in held:
            return Attestation("failed", f"the engine does not hold {name} after loading it")
        if held[name] != digest:
            return Attestation("failed", f"the engine received sha256 {held[name]}, {digest} was exported")
        return None


def _must_pass(name: str, verdict: Attestation) -> None:
    log.info("after a return of the engine, %s: %s: %s", name, verdict.verdict, verdict.detail)
    if verdict.verdict == "failed":
        raise AttestationFailed(
            f"after its return the engine does not serve {name} as it did when that was attested: {verdict.detail}",
            hint="Nothing was sampled from it since; the log of the engine tells what it did. Then resume the run.",
        )
