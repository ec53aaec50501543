"""Bring a version into the engine: load it, attest it, and look again where that was inconclusive."""

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from lorad.engines.base import AdapterSource
from lorad.errors import AttestationFailed, EngineGone
from lorad.pool.attest.amplified import Amplified, Prediction, Rerouted, judge_amplified, worst_of
from lorad.pool.attest.attester import UNLOADED
from lorad.pool.attest.verdict import Claim, Outcome
from lorad.pool.loaded import PoolVersion
from lorad.pool.state import Pool
from lorad.protocol.calls import Attestation

_TRIES = 3  # of an engine that dies and comes back


class Predictors(NamedTuple):
    """What the trainer says of the version, amplified. Each takes its own turn.

    Attributes:
        anew: Asks on the canaries or, with True, on twice as many.
        with_routes: Asks for each server, with its routes.
    """

    anew: Callable[[bool], Awaitable[Prediction | None]]
    with_routes: Callable[[Rerouted], Awaitable[list[Prediction]]]


T = TypeVar("T")


class Live(NamedTuple):
    entry: PoolVersion
    outcome: Outcome
    load_seconds: float
    attest_seconds: float


async def bring(
    pool: Pool, version: str, source: AdapterSource, claim: Claim, predict: Predictors, *, run: str = ""
) -> Live:
    """Load and attest a version; the verdict is in its entry. Nobody finds it before it is put into
    `pool.loaded`.

    Raises AttestationFailed; then, and whatever else is raised, nothing of it is left.
    """
    live = await _patiently(lambda: _loaded(pool, version, source, claim, run))
    begun = time.perf_counter()
    try:
        live = await _judged(pool, live, source, claim, predict, run)
        if live.entry.verdict.verdict == "failed":
            raise AttestationFailed(
                f"{version} failed its attestation: {live.entry.verdict.detail}", hint=UNLOADED
            )
    except BaseException:
        await pool.loaded.refuse(live.entry)
        raise
    return live._replace(attest_seconds=live.attest_seconds + time.perf_counter() - begun)


async def attest_loaded(
    pool: Pool, entry: PoolVersion, source: AdapterSource, claim: Claim, predict: Predictors
) -> Attestation:
    """Judge a loaded version once more, which the caller keeps from being unloaded."""

    async def looked_at() -> Live:
        async with pool.phases.serving(), pool.engine.settled():
            await pool.loaded.make_room(entry.version, pool.attester.places - 1)
            return Live(entry, await pool.attester.attest(entry.engine_name, source, claim), 0.0, 0.0)

    return (await _judged(pool, await _patiently(looked_at), source, claim, predict, "")).entry.verdict


async def _judged(
    pool: Pool, live: Live, source: AdapterSource, claim: Claim, predict: Predictors, run: str
) -> Live:
    """Store the verdict in the version's entry, after a second look where the first one was not enough."""
    live = await _judged_by_routes(pool, live, predict)
    if live.outcome.wants_more(is_proven=claim.proven == pool.attester.returns):
        # an amplified test, or, where that was done already, one on more canaries
        prediction = await predict.anew(live.outcome.amplified is not None)
        if prediction is not None:

            async def amplified() -> Outcome:
                async with pool.phases.serving(run), pool.engine.settled():
                    await pool.loaded.make_room(live.entry.version, 1)
                    result = await pool.attester.amplified(live.entry.engine_name, source, prediction)
                return replace(live.outcome, amplified=result)

            live = live._replace(outcome=await _patiently(amplified))
        live = await _judged_by_routes(pool, live, predict)
    verdict = live.outcome.verdict(is_proven=claim.proven == pool.attester.returns)
    live.entry.verdict = replace(verdict, delivered_sha256=live.entry.delivered)
    return live


async def _judged_by_routes(pool: Pool, live: Live, predict: Predictors) -> Live:
    """Judge an amplified test again, with the routes of the engine, where these are known and may differ."""
    amplified = live.outcome.amplified
    if amplified is None or (seen := amplified.rerouted) is None:
        return live
    predictions = await predict.with_routes(seen)
    worst = worst_of(
        judge_amplified(prediction, by_server.logprobs.astype(np.float64), pool.attester.limits)
        for prediction, by_server in zip(predictions, seen.by_server, strict=True)
    )
    verdict = replace(worst.verdict, detail=f"{worst.verdict.detail}, with the engine's routes")
    return live._replace(outcome=replace(live.outcome, amplified=Amplified(verdict, worst.worth_repeating)))


async def _patiently(bring: Callable[[], Awaitable[T]]) -> T:
    """Bring a version in, and start over when the engine died and came back."""
    tries = 0
    while True:
        try:
            return await bring()
        except EngineGone:
            tries += 1
            if tries == _TRIES:
                raise


async def _loaded(pool: Pool, version: str, source: AdapterSource, claim: Claim, run: str) -> Live:
    async with pool.phases.serving(run), pool.engine.settled():
        await pool.loaded.make_room(version, pool.attester.places)
        begun = time.perf_counter()
        entry = await pool.loaded.publish(version, source)
        loaded = time.perf_counter()
        try:
            outcome = await pool.attester.attest(entry.engine_name, source, claim)
        except BaseException:
            await pool.loaded.refuse(entry)
            raise
        return Live(entry, outcome, loaded - begun, time.perf_counter() - loaded)
