"""The direct comparison of attestation.

On canaries, the change that the version makes to the engine's log-probabilities, de, against the change that
the trainer's slot makes to its own, dt (each side against its own base, so that most of their rounding drops
out):

    rel = |de - dt| / |dt|      slope = <de, dt> / |dt|^2      z = <de - dt(v-1), u> / |u|^2,  u = dt(v) -
    dt(v-1)

rel sees wrong tensors; z, 1 for this version and 0 for the previous one, sees staleness, which rel misses
late in a run. Both are as noisy as sigma (canaries.py) over the size of the change; their limits grow with
it, so that noise alone fails nothing, and where they have grown too large to prove anything the verdict is
inconclusive.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from lorad.pool.attest.canaries import Canaries
from lorad.protocol.calls import Attestation

_NOISE_FACTOR = 6.0  # limits, in units of what sigma alone explains
_DILUTION = 4.0  # the noise in u itself draws z towards 0 by about (noise / |u|)^2; so many times that


class Tolerances(Struct, frozen=True):
    """What engine and trainer may differ by.

    Attributes:
        least_sigma: The noise in nats that is assumed where both sides agree bit for bit on the base.
        rel: The limit of rel without noise.
        rel_blind: The limit beyond which rel proves nothing.
        largest, mean: The limits of |engine - trainer| in nats; more where sigma or the change is large.
        rounding: The mean difference as a share of the change's rms.
        amplified: The limit of rel in the amplified test.
    """

    least_sigma: float
    rel: float
    rel_blind: float
    largest: float
    mean: float
    rounding: float
    amplified: float
    z: float = 0.5


FLOAT32 = Tolerances(
    least_sigma=2e-7, rel=5e-3, rel_blind=2e-2, largest=1e-4, mean=1e-5, rounding=1e-6, amplified=1e-4
)
BFLOAT16 = Tolerances(
    least_sigma=2e-3, rel=4e-2, rel_blind=0.12, largest=0.2, mean=2e-2, rounding=2e-2, amplified=4e-2
)
_LARGEST_SIGMAS = 15.0
_MEAN_SIGMAS = 2.0
_LARGEST_TO_MEAN = 8.0
SEVERITY = ("passed", "inconclusive", "failed")


class AttestedScores(Struct, frozen=True):
    """What the engine said of a version when it was attested, float64 [T], and dt of the one before it."""

    canaries: Canaries
    engine: np.ndarray
    previous: np.ndarray


def judge(
    canaries: Canaries, engine: np.ndarray, trainer: np.ndarray, previous: np.ndarray, limits: Tolerances
) -> Attestation:
    """Compare what engine and trainer say of a version; `previous` is dt(v-1)."""
    if not np.isfinite(engine).all():
        return Attestation("failed", "the engine's log-probabilities are not finite")
    if not np.isfinite(trainer).all():
        return Attestation("failed", "the trainer's log-probabilities are not finite")
    facts = measure(canaries, engine, trainer, previous, limits)
    rounding = limits.rounding * facts["signal"]
    largest = max(limits.largest, _LARGEST_SIGMAS * facts["sigma"], _LARGEST_TO_MEAN * rounding)
    mean = max(limits.mean, _MEAN_SIGMAS * facts["sigma"], rounding)
    wrong = [
        f"{what} {facts[key]:.3g}, at most {limit:.3g}"
        for what, key, limit in (
            ("largest difference", "largest", largest),
            ("mean difference", "mean", mean),
            ("rel", "rel", facts.get("rel_limit", 0.0)),
            ("|z - 1|", "z_error", facts.get("z_limit", 0.0)),
        )
        if key in facts and facts[key] > limit
    ]
    if wrong:
        return Attestation("failed", f"{resembles(facts)}: {'; '.join(wrong)}", facts)
    numbers = f"signal {facts['signal']:.2g} nats rms, noise {facts['sigma']:.2g}"
    if "rel" not in facts:
        return Attestation(
            "passed", f"it changes nothing yet; largest difference {facts['largest']:.2g} nats", facts
        )
    if facts["rel_limit"] > limits.rel_blind:
        return Attestation("inconclusive", f"delivered, but too little signal to tell more: {numbers}", facts)
    if "z" in facts and facts["z_limit"] > limits.z:
        step = f"step {facts['step']:.2g} nats rms, noise {facts['sigma']:.2g}"
        return Attestation("inconclusive", f"delivered, but too close to the previous version: {step}", facts)
    z = f", z {facts['z']:.3f}" if "z" in facts else ""
    return Attestation("passed", f"rel {facts['rel']:.2g}{z}; {numbers}", facts)


def judge_again(
    reference: AttestedScores, now: np.ndarray, base: np.ndarray, limits: Tolerances
) -> Attestation:
    """Return the verdict on an engine that is compared with itself, which takes the place of the trainer.

    Today it says `now` of the version, and `base` of the base.
    """
    canaries = replace(reference.canaries, engine=base, trainer=reference.canaries.engine)
    return judge(canaries, now, reference.engine, reference.previous, limits)


def worst(verdicts: Sequence[Attestation]) -> Attestation:
    """Return the worst of several servers' verdicts: all servers have to pass."""
    result = max(verdicts, key=lambda verdict: SEVERITY.index(verdict.verdict))
    alike = sum(verdict.verdict == result.verdict for verdict in verdicts)
    if alike == len(verdicts):
        return result
    return replace(result, detail=f"{result.detail} ({alike} of {len(verdicts)} servers)")


def measure(
    canaries: Canaries, engine: np.ndarray, trainer: np.ndarray, previous: np.ndarray, limits: Tolerances
) -> dict[str, float]:
    """Return the numbers behind a verdict; without rel and slope when dt is zero, without z when u is."""
    de = engine - canaries.engine
    dt = trainer - canaries.trainer
    u = dt - previous
    difference = np.abs(engine - trainer)
    sigma = max(canaries.sigma, limits.least_sigma)
    noise = sigma * np.sqrt(canaries.tokens)  # the L2 norm of pure noise
    norm = float(np.linalg.norm(dt))
    step = float(np.linalg.norm(u))
    facts = {
        "sigma": sigma,
        "signal": norm / np.sqrt(canaries.tokens),
        "step": step / np.sqrt(canaries.tokens),
        "largest": float(difference.max()),
        "mean": float(difference.mean()),
    }
    if norm > 0:
        facts["rel"] = float(np.linalg.norm(de - dt)) / norm
        facts["rel_limit"] = max(limits.rel, _NOISE_FACTOR * noise / norm)
        facts["slope"] = float(de @ dt) / norm**2
    if step > 0:
        facts["z"] = float((de - previous) @ u) / step**2
        facts["z_error"] = abs(facts["z"] - 1)
        averaged = _NOISE_FACTOR * sigma / step
        diluted = _DILUTION * (noise / step) ** 2
        facts["z_limit"] = max(limits.z, averaged, diluted)
    return {key: float(value) for key, value in facts.items()}


def resembles(facts: dict[str, float]) -> str:
    """Describe what the engine seems to serve instead."""
    if "rel" not in facts:
        return "the engine does not answer like the base, which a fresh adapter equals"
    slope = facts["slope"]
    z = facts.get("z", 1.0)
    numbers = f"slope {slope:.3g}, z {z:.3g}"
    if abs(slope) < 0.1:
        return f"the engine answers like the base ({numbers})"
    if abs(z) < 0.25:
        return f"the engine answers like the previous version ({numbers})"
    if 1.8 < slope < 2.2:
        return f"the engine applies the adapter with twice its scale ({numbers})"
    return f"the engine serves other tensors than were exported ({numbers})"
