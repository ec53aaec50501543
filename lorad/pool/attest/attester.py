"""Attestation: whether the engine, asked for a version, serves exactly the adapter that the trainer exported.

*Delivery*: the digest of what the engine received. *Direct comparison* (direct.py), which every server of the
engine has to pass; where trainer and engine share a process and fp32 it suffices. Elsewhere also the *name
test* (by_name.py), on every version, and the *amplified test* (amplified.py): when a run begins or is
resumed, when the engine has come back and does not repeat its bits, on every k-th version, and on every
version that is loaded from its files.

What the first server said is kept: a part of the engine that has lost its memory (restart, wake) is compared
with it before anybody is served by that part. Bit for bit the same, it is what was attested; else it has to
be the same within the limits of the direct comparison, and the next version of each run is amplified again.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
from msgspec.structs import replace

from lorad.adapters.targets import experts_of
from lorad.engines.base import BASE, AdapterSource, Engine, Scorer
from lorad.errors import AttestationFailed, NotFound
from lorad.pool.attest.amplified import Amplified, Prediction, Rerouted, judge_amplified, worst_of
from lorad.pool.attest.by_name import Others, judge_name, rms_between, same_bits
from lorad.pool.attest.canaries import (
    Canaries,
    count_needed,
    first_canaries,
    measure_canaries,
    sample_canaries,
    score_on_servers,
)
from lorad.pool.attest.direct import BFLOAT16, FLOAT32, AttestedScores, judge, judge_again, worst
from lorad.pool.attest.prediction import Predictor
from lorad.pool.attest.verdict import Claim, Outcome
from lorad.pool.phases import Phases
from lorad.protocol.calls import CANARIES, CANARY_TOKENS, Attestation
from lorad.trainers.base import Policy, Trainer

log = logging.getLogger(__name__)

UNLOADED = "It was unloaded and nothing was sampled from it; the log of the engine shows what it did."
MARK = "~"  # in the names of copies, and of nothing else


class Attester:
    """Attests on one engine and trainer; canaries are made once for each (count, tokens).

    What needs the engine awake, or the trainer's base on its devices, takes its turn in `phases` where it
    says nothing else.

    Attributes:
        placeholders: The ids that no prompt of a canary has, see `sample_canaries`.
        returns: How often the engine came back and did not repeat its bits.
        returned_the_same: Whether it repeated them the last time.

    Args:
        is_apart: Whether engine and trainer are not one process with one base.
        has_experts: Whether the base is a mixture.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        phases: Phases,
        *,
        is_apart: bool = False,
        has_experts: bool = False,
    ) -> None:
        self._engine = engine
        self._trainer = trainer
        self._vocab_size = trainer.capabilities().vocab
        self._phases = phases
        dtypes = {engine.capabilities().dtype, trainer.capabilities().dtype}
        self.limits = FLOAT32 if dtypes == {"float32"} else BFLOAT16
        self._may_reroute = has_experts and self.limits is BFLOAT16
        routes = engine.capabilities().routes
        self._replays = self._may_reroute and routes is not None and routes == trainer.capabilities().routes
        self.is_direct_enough = not is_apart and self.limits is FLOAT32
        self.predictor = Predictor(trainer, self.limits.least_sigma)
        self.placeholders: frozenset[int] = frozenset()
        self.returns = 0
        self.returned_the_same = True
        self._repeats = True  # whether the engine repeats its bits, as far as is known
        self._copying = asyncio.Lock()  # there is one copy at a time
        self._copies = itertools.count(1)
        self._canaries: dict[tuple[int, int], Canaries] = {}  # by count and tokens
        self._sampling = asyncio.Lock()
        self._references: dict[str, AttestedScores] = {}  # by the engine's name
        engine.on_return(self.check)

    @property
    def places(self) -> int:
        """Return how many versions the engine has to have room for while one is attested."""
        return 1 if self.is_direct_enough else 2

    async def canaries(self, count: int, tokens: int, run: str = "") -> Canaries:
        """Return the canaries of a size, which are made once.

        The engine says last what it makes of them, so that whatever returns is compared with that from then
        on. Raises AttestationFailed when engine and trainer do not hold the same base.
        """
        async with self._sampling:
            if (count, tokens) not in self._canaries:
                async with self._phases.serving(run):
                    batch = await sample_canaries(
                        self._engine, self._vocab_size, count, tokens, self.placeholders
                    )
                async with self._phases.with_base(run):
                    trainer = await self._trainer.logprobs(Policy(), batch)
                    unmet = await self.predictor.unmet_experts(batch)
                    enough = count_needed(trainer, batch)
                    few = first_canaries(batch, enough)
                    while few is not batch and await self.predictor.unmet_experts(few) != unmet:
                        enough = min(2 * enough, batch.completion_lengths.size)
                        few = first_canaries(batch, enough)
                    trainer_few = trainer if few is batch else await self._trainer.logprobs(Policy(), few)
                async with self._phases.serving(run), self._engine.settled():
                    measured = partial(measure_canaries, self._engine, may_reroute=self._may_reroute)
                    every = await measured(trainer, batch, unmet)
                    if few is not batch:
                        every = replace(every, few=await measured(trainer_few, few, unmet))
                    self._canaries[count, tokens] = every
                    log.info(
                        "engine and trainer differ by %.2g nats (rms) on %d tokens of the base",
                        every.sigma, every.tokens,
                    )  # fmt: skip
                    is_stable = self._engine.capabilities().bit_stable
                    if not self.is_direct_enough and self._repeats and not is_stable:
                        again = await self._scores(BASE, every)
                        self._repeats = np.array_equal(again[0], every.engine)
                        log.info("the engine %s its bits", "repeats" if self._repeats else "does not repeat")
        return self._canaries[count, tokens]

    async def any_canaries(self) -> Canaries:
        """Return canaries of any size, the first that were made, or new ones of the default size."""
        return await self.canaries(*next(iter(self._canaries), (CANARIES, CANARY_TOKENS)))

    async def twice(self, canaries: Canaries, run: str = "") -> Canaries:
        """Return twice as many canaries."""
        count, tokens = next(size for size, every in self._canaries.items() if every is canaries)
        return await self.canaries(2 * count, tokens, run)

    async def attest(self, name: str, source: AdapterSource, claim: Claim) -> Outcome:
        """Test whether `name` serves what is claimed.

        Call it inside the same `Engine.settled` as the load.
        """
        if (missing := await self.delivery(name, source.digest)) is not None:
            return Outcome(missing)
        canaries = claim.canaries
        before = np.zeros_like(claim.trainer) if claim.previous is None else claim.previous
        by_server = await self._scores(name, canaries)
        direct = worst([judge(canaries, engine, claim.trainer, before, self.limits) for engine in by_server])
        modules = () if source.adapter is None else source.adapter.config.modules
        adapted = {name.rpartition(".")[0] for name in modules if experts_of(name)}
        is_unknown = bool(adapted) and canaries.unmet is None
        unmet = None if is_unknown else tuple(sorted(adapted & (canaries.unmet or frozenset())))
        is_dora = source.adapter is not None and source.adapter.config.dora
        outcome = Outcome(direct, unmet=unmet, is_dora=is_dora)
        if direct.verdict != "failed" and not self.is_direct_enough:
            # the name test
            async with self._temporary_copy(name, "copy", source) as temporary:
                copied = await self._scores(temporary, claim.canaries)
                if self._repeats and not same_bits(by_server, copied):
                    again = (
                        await self._scores(name, claim.canaries),
                        await self._scores(temporary, claim.canaries),
                    )
                    self._repeats = same_bits(by_server, again[0]) and same_bits(copied, again[1])
            previous = self._references.get(claim.previous_name)
            is_comparable = previous is not None and previous.canaries is claim.canaries
            others = Others(claim.canaries.engine, previous.engine if previous and is_comparable else None)
            noise = None
            if not self._repeats:
                signal = rms_between(by_server[0], others.base)
                noise = max(claim.canaries.sigma, self.limits.least_sigma, self.limits.rounding * signal)
            named = judge_name(by_server, copied, others, noise)
            amplified = None
            if claim.prediction is not None and named.verdict != "failed":
                amplified = await self.amplified(name, source, claim.prediction)
            outcome = replace(outcome, named=named, amplified=amplified)
        if "failed" not in (direct.verdict, outcome.named and outcome.named.verdict):
            self._references[name] = AttestedScores(canaries, by_server[0], before)
        return outcome

    async def amplified(self, name: str, source: AdapterSource, prediction: Prediction) -> Amplified:
        """Return the amplified test of the tensors behind `name`, on every server.

        Inside `Engine.settled`.
        """
        assert source.adapter is not None
        copy = AdapterSource(source.digest, adapter=source.adapter.amplified(prediction.times))
        async with self._temporary_copy(name, "amplified", copy) as temporary:
            batch = prediction.canaries.batch
            by_server = await score_on_servers(self._engine, temporary, batch, with_routes=self._replays)
        numbers = [said.logprobs.astype(np.float64) for said in by_server]
        result = worst_of(judge_amplified(prediction, engine, self.limits) for engine in numbers)
        if result.verdict.verdict == "passed" or not self._replays:
            return result
        return replace(result, rerouted=Rerouted(prediction, tuple(by_server)))

    def forget(self, name: str) -> None:
        """Drop the reference of a version that is no longer served."""
        self._references.pop(name, None)

    async def check(self, score: Scorer) -> None:
        """Raise AttestationFailed unless `score` says of base and versions what the engine said before."""
        is_same = True
        for canaries in [every.few or every for every in self._canaries.values()]:
            base = (await score(BASE, canaries.batch)).astype(np.float64)
            is_same &= np.array_equal(base, canaries.engine)
            then = AttestedScores(canaries, canaries.engine, np.zeros_like(base))
            _must_pass(BASE, judge_again(then, base, canaries.engine, self.limits))
            for name, reference in list(self._references.items()):
                if reference.canaries is not canaries:
                    continue
                try:
                    now = (await score(name, canaries.batch)).astype(np.float64)
                except NotFound:
                    if name in self._references:
                        raise
                    continue
                _must_pass(name, judge_again(reference, now, base, self.limits))
                is_same &= np.array_equal(now, reference.engine)
        self.returned_the_same = is_same
        self.returns += not is_same

    @asynccontextmanager
    async def _temporary_copy(self, name: str, purpose: str, source: AdapterSource) -> AsyncIterator[str]:
        """Provide the name of a copy of `name`, which is unloaded at the end. Inside `Engine.settled`."""
        async with self._copying:
            copy = f"{name}{MARK}{purpose}{next(self._copies)}"
            await self._engine.load(copy, source)
            try:
                yield copy
            finally:
                await self._engine.unload(copy)

    async def _scores(self, name: str, canaries: Canaries) -> list[np.ndarray]:
        return [scores.astype(np.float64) for scores in await self._engine.scores(name, canaries.batch)]

    async def delivery(self, name: str, digest: str) -> Attestation | None:
        """Return what is wrong; None when the engine says that it holds `digest` under `name`."""
        digests = {version.name: version.digest for version in await self._engine.loaded()}
        if name not in digests:
            return Attestation("failed", f"the engine does not hold {name} after loading it")
        if digests[name] != digest:
            return Attestation("failed", f"the engine received sha256 {digests[name]}, {digest} was exported")
        return None


def _must_pass(name: str, verdict: Attestation) -> None:
    log.info("after a return of the engine, %s: %s: %s", name, verdict.verdict, verdict.detail)
    if verdict.verdict == "failed":
        raise AttestationFailed(
            f"after its return the engine does not serve {name} as it did when that was attested: "
            f"{verdict.detail}",
            hint="Nothing was sampled from it since; the log of the engine shows what it did. Then resume "
            "the run.",
        )
