"""The amplified test of attestation: a copy with alpha x K in the engine, against the trainer's prediction of
the same.

K is a power of two, so that it rounds nothing, and so large that the change stands far above the engine's
noise. Then rel and z (direct.py) show a dropped target, a doubled scale, a stale or garbled tensor, also
where a direct comparison sees nothing but rounding.
"""

import math
from collections.abc import Awaitable, Callable, Iterable

import numpy as np
from msgspec import Struct

from lorad.engines.base import Scored
from lorad.pool.attest.canaries import Canaries
from lorad.pool.attest.direct import SEVERITY, Tolerances, measure, resembles
from lorad.protocol.calls import Attestation

_LEAST_SIGMAS = 60.0
LEAST_NATS = 2.0
MOST_NATS = 5.0  # of the amplified change, rms
_ROOM = 2.2  # the change may be so many times as large as it has to be
_MOST_TRIES = 6
_MOST_DOUBLINGS = 24
_NOISE_RATIO = 2.75
_LEAST_LIMIT = 0.4
"""Noise alone makes a rel of 1.4 to 2.2 sigmas over the change. The limit of rel is so many of these, at most
the `Tolerances.amplified` of the dtype, and at least such a share of that."""

_REROUTED = 0.5
_REROUTED_SLOPE = 0.2
"""Where engine and trainer send some tokens to different experts, a right adapter had a rel of up to 0.29,
and of 0.03 with the same experts on both sides. So there a rel of up to 0.5 proves nothing, unless the whole
change is too large or too small."""
_GATE_SIGMAS = 50.0  # rms of the amplified change below which it proves nothing
_STEP_SIGMAS = 8.0  # L2 norm of the amplified step below which z proves nothing
_NEARLY = 1.5
"""A rel of up to so many limits is looked at again before it is a failure. With the engine's routes in the
trainer it proves nothing: right adapters had a rel of up to 0.045 in bfloat16, where noise explained 0.05."""


class Prediction(Struct, frozen=True):
    """What the trainer says of a version with alpha x `times`.

    Attributes:
        now: Its log-probabilities, float64 [T].
        before: dt of the previous version with the same alpha x `times`; zero where that is the base.
        is_replayed: Whether the tokens were sent to the engine's experts.
    """

    canaries: Canaries
    times: float
    now: np.ndarray
    before: np.ndarray
    is_replayed: bool = False


class Rerouted(Struct, frozen=True):
    """What each server said of the copy, and where it sent the tokens, which the trainer may not have."""

    prediction: Prediction
    by_server: tuple[Scored, ...]


class Amplified(Struct, frozen=True):
    """The result of an amplified test.

    Attributes:
        worth_repeating: Whether it is worth a second look on more canaries.
        rerouted: What the trainer needs to predict it anew with the engine's routes; None where it cannot.
    """

    verdict: Attestation
    worth_repeating: bool = False
    rerouted: Rerouted | None = None


async def amplification(
    score: Callable[[float], Awaitable[np.ndarray]], canaries: Canaries, sigma: float, begin: float
) -> tuple[float, np.ndarray] | None:
    """Return K, the first of which to try is `begin`, and what `score(K)` says then.

    None when the version changes nothing at all.
    """
    least = max(_LEAST_SIGMAS * sigma, LEAST_NATS)
    scores: dict[float, np.ndarray] = {}
    sizes: dict[float, float] = {}
    times = begin
    for _ in range(_MOST_TRIES):
        scores[times] = await score(times)
        sizes[times] = float(np.sqrt(np.mean((scores[times] - canaries.trainer) ** 2)))
        if sizes[times] == 0 or not math.isfinite(sizes[times]):
            return None
        if least <= sizes[times] <= min(_ROOM * least, MOST_NATS):
            break
        doublings = math.ceil(math.log2(least / sizes[times]))
        times *= 2.0 ** max(-_MOST_DOUBLINGS, min(_MOST_DOUBLINGS, doublings))
        if times in scores or abs(math.log2(times)) > _MOST_DOUBLINGS:
            break
    best = min(sizes, key=lambda k: abs(math.log(sizes[k] / (1.4 * min(least, MOST_NATS)))))
    return best, scores[best]


def judge_amplified(prediction: Prediction, engine: np.ndarray, limits: Tolerances) -> Amplified:
    """Return the verdict on the copy, whose log-probabilities in the engine are given."""
    if not (np.isfinite(engine).all() and np.isfinite(prediction.now).all()):
        return Amplified(Attestation("failed", "amplified log-probabilities are not finite"))
    facts = measure(prediction.canaries, engine, prediction.now, prediction.before, limits)
    figures = {f"amplified_{key}": facts[key] for key in ("rel", "slope", "z", "signal") if key in facts}
    figures["amplified"] = prediction.times
    if facts["signal"] < _GATE_SIGMAS * facts["sigma"]:
        why = (
            f"too little signal also when amplified {prediction.times:g} times: {facts['signal']:.2g} nats "
            f"rms, noise {facts['sigma']:.2g}"
        )
        return Amplified(Attestation("inconclusive", why, figures), worth_repeating=True)
    noise = _NOISE_RATIO * facts["sigma"] / facts["signal"]
    limit = min(max(noise, _LEAST_LIMIT * limits.amplified), limits.amplified)
    excused = ""  # why a rel above the limit, which noise would explain, proves nothing
    if prediction.is_replayed:
        excused = "it is near the limit of a mixture" * (facts["rel"] <= _NEARLY * max(limit, noise))
    elif prediction.canaries.reroutes and facts["rel"] <= _REROUTED:
        is_sized = abs(facts["slope"] - 1) <= _REROUTED_SLOPE
        excused = "engine and trainer send some tokens to different experts" * is_sized
    if facts["rel"] > limit and excused:
        why = (
            f"amplified {prediction.times:g} times: rel {facts['rel']:.2g}, which may be rounding: {excused}"
        )
        return Amplified(Attestation("inconclusive", why, figures))
    if facts["rel"] > limit:
        is_near = facts["rel"] <= _NEARLY * limit
        return Amplified(Attestation("failed", _wrong(prediction, facts, "rel", limit), figures), is_near)
    step = facts["step"] * np.sqrt(prediction.canaries.tokens)
    if step < _STEP_SIGMAS * facts["sigma"]:
        detail = f"amplified {prediction.times:g} times: too close to the previous version to tell them apart"
        return Amplified(Attestation("inconclusive", detail, figures), worth_repeating=step > 0)
    if facts["z_error"] > limits.z:
        return Amplified(Attestation("failed", _wrong(prediction, facts, "z_error", limits.z), figures))
    detail = f"amplified {prediction.times:g} times: rel {facts['rel']:.2g}, z {facts['z']:.3f}"
    return Amplified(Attestation("passed", detail, figures))


def worst_of(results: Iterable[Amplified]) -> Amplified:
    return max(results, key=lambda result: SEVERITY.index(result.verdict.verdict))


def _wrong(prediction: Prediction, facts: dict[str, float], key: str, limit: float) -> str:
    name = {"rel": "rel", "z_error": "|z - 1|"}[key]
    return (
        f"amplified {prediction.times:g} times {resembles(facts)}: {name} {facts[key]:.3g}, at most "
        f"{limit:.3g}"
    )
