"""What each test of an attestation says of given numbers."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from lorad.pool.attest.amplified import (
    LEAST_NATS,
    MOST_NATS,
    Amplified,
    Prediction,
    amplification,
    judge_amplified,
)
from lorad.pool.attest.by_name import Others, judge_name
from lorad.pool.attest.canaries import Canaries, has_outliers
from lorad.pool.attest.direct import BFLOAT16, FLOAT32
from lorad.pool.attest.verdict import Outcome
from lorad.protocol.batch import Batch
from lorad.protocol.calls import Attestation

TOKENS, SIGMA = 192, 1e-2
RNG = np.random.default_rng(0)
BASE, CHANGE = RNG.normal(-2, 1, TOKENS), RNG.normal(0, 2, TOKENS)
NOISE = RNG.normal(0, SIGMA, TOKENS)
PASSED, FAILED = Attestation("passed", ""), Attestation("failed", "")
UNSURE = Attestation("inconclusive", "")


def canaries(sigma: float = SIGMA) -> Canaries:
    zeros = np.zeros(1, np.int32)
    return Canaries(Batch(zeros, zeros, zeros, np.zeros(TOKENS, np.int32), zeros), BASE, BASE, sigma)


def predicted(before: np.ndarray | None = None, change: np.ndarray = CHANGE) -> Prediction:
    return Prediction(canaries(), 64.0, BASE + change, np.zeros(TOKENS) if before is None else before)


def verdict(engine: np.ndarray, prediction: Prediction) -> str:
    return judge_amplified(prediction, BASE + engine, BFLOAT16).verdict.verdict


def test_noise_alone_passes_when_amplified() -> None:
    assert verdict(CHANGE + NOISE, predicted()) == "passed"


@pytest.mark.parametrize("times", [0.0, 0.5, 0.97, 1.03, 2.0])
def test_another_scale_fails_when_amplified(times: float) -> None:
    assert verdict(times * CHANGE + NOISE, predicted()) == "failed"


@pytest.mark.parametrize(
    ("times", "aside", "found"),
    [(1.0, 0.3, "inconclusive"), (1.0, 0.8, "failed"), (0.7, 0.0, "failed"), (1.0, 0.0, "passed")],
)
def test_tokens_at_other_experts_prove_nothing(times: float, aside: float, found: str) -> None:
    """In a mixture in bfloat16, engine and trainer send some tokens to different experts."""
    some = RNG.normal(0, aside * 2, TOKENS)
    prediction = replace(predicted(), canaries=replace(canaries(), reroutes=True))
    assert verdict(times * CHANGE + some + NOISE, prediction) == found
    if aside:
        assert verdict(times * CHANGE + some + NOISE, predicted()) == "failed"


@pytest.mark.parametrize(
    ("aside", "found"), [(0.0, "passed"), (0.02, "inconclusive"), (0.04, "failed"), (0.3, "failed")]
)
def test_replayed_routes_excuse_little(aside: float, found: str) -> None:
    prediction = replace(predicted(), is_replayed=True, canaries=replace(canaries(), reroutes=True))
    assert verdict(CHANGE + RNG.normal(0, aside * 2, TOKENS) + NOISE, prediction) == found


def test_noise_with_outliers_is_that_of_routes() -> None:
    outliers = np.where(np.arange(TOKENS) % 10 == 0, 8 * NOISE, NOISE)
    assert has_outliers(outliers) and not has_outliers(NOISE) and not has_outliers(0 * NOISE)


def test_dropped_target_fails_when_amplified() -> None:
    """rel 0.03, a few times what noise explains here."""
    aside = RNG.normal(0, 0.03 * 2, TOKENS)
    assert verdict(CHANGE + aside + NOISE, predicted()) == "failed"


def test_staleness_below_what_rel_sees_fails_when_amplified() -> None:
    step = RNG.normal(0, 0.015, TOKENS)
    stale = predicted(before=CHANGE - step)
    assert verdict(CHANGE - step, stale) == "failed" and verdict(CHANGE, stale) == "passed"


def test_change_below_the_noise_never_passes() -> None:
    weak = predicted(change=10 * NOISE)
    assert judge_amplified(weak, weak.now, BFLOAT16) == Amplified(
        judge_amplified(weak, weak.now, BFLOAT16).verdict, worth_repeating=True
    )
    assert verdict(10 * NOISE, weak) == "inconclusive"
    assert verdict(CHANGE, predicted(before=CHANGE)) == "inconclusive"
    assert verdict(CHANGE, predicted(before=CHANGE + 1e-3 * NOISE)) == "inconclusive"


def test_amplified_numbers_that_are_not_finite_fail() -> None:
    assert verdict(np.full(TOKENS, np.nan), predicted()) == "failed"


def test_rel_just_above_its_limit_is_repeated() -> None:
    def found(rel: float) -> Amplified:
        aside = CHANGE[::-1] - CHANGE * (CHANGE[::-1] @ CHANGE) / (CHANGE @ CHANGE)
        aside *= rel * np.linalg.norm(CHANGE) / np.linalg.norm(aside)
        return judge_amplified(predicted(), BASE + CHANGE + aside, BFLOAT16)

    assert (found(0.012).verdict.verdict, found(0.02).verdict.verdict) == ("passed", "failed")
    assert found(0.02).worth_repeating and not found(0.04).worth_repeating


@pytest.mark.parametrize("slope", [1e-6, 3e-3, 0.7, 40.0])
@pytest.mark.parametrize("begin", [1.0, 64.0])
def test_amplified_change_is_a_few_nats(slope: float, begin: float) -> None:
    async def score(times: float) -> np.ndarray:
        return np.asarray(BASE + slope * times * CHANGE / 2)

    found = asyncio.run(amplification(score, canaries(), SIGMA, begin))
    assert found is not None
    times, now = found
    assert LEAST_NATS <= np.sqrt(np.mean((now - BASE) ** 2)) <= MOST_NATS and np.log2(times) % 1 == 0


def test_a_version_that_changes_nothing_is_not_amplified() -> None:
    async def score(times: float) -> np.ndarray:
        return BASE

    assert asyncio.run(amplification(score, canaries(), SIGMA, 1.0)) is None


def test_name_must_equal_its_copy_bit_for_bit() -> None:
    name, others = BASE + CHANGE, Others(BASE, BASE + 0.9 * CHANGE)
    assert judge_name([name], [name.copy()], others).verdict == "passed"
    assert judge_name([name], [np.nextafter(name, 0)], others).verdict == "failed"
    assert judge_name([name, name], [name, others.base], others).verdict == "failed"


@pytest.mark.parametrize(
    ("others", "like"), [(Others(BASE), "the base"), (Others(CHANGE, BASE), "the previous")]
)
def test_name_and_copy_like_another_prove_nothing(others: Others, like: str) -> None:
    for found in (judge_name([BASE], [BASE], others), judge_name([BASE], [BASE + NOISE], others, SIGMA)):
        assert found.verdict == "inconclusive" and like in found.detail


def test_names_that_differ_by_more_than_noise_fail() -> None:
    name, others = BASE + CHANGE, Others(BASE)
    assert judge_name([name], [name + NOISE], others, SIGMA).verdict == "passed"
    assert judge_name([name], [name + 5 * NOISE], others, SIGMA).verdict == "failed"


@pytest.mark.parametrize(
    ("direct", "named", "amplified", "proven", "expected"),
    [
        (PASSED, None, None, False, "passed"),
        (UNSURE, None, None, False, "inconclusive"),
        (UNSURE, PASSED, PASSED, False, "passed"),
        (UNSURE, PASSED, None, True, "passed"),
        (UNSURE, PASSED, None, False, "inconclusive"),
        (UNSURE, PASSED, UNSURE, True, "inconclusive"),
        (UNSURE, UNSURE, PASSED, True, "inconclusive"),
        (PASSED, PASSED, FAILED, True, "failed"),
        (PASSED, FAILED, None, True, "failed"),
        (FAILED, None, None, True, "failed"),
    ],
)
def test_the_verdict_over_all_tests(
    direct: Attestation, named: Attestation | None, amplified: Attestation | None, proven: bool, expected: str
) -> None:
    direct = replace(direct, facts={"rel": 0.0})
    outcome = Outcome(direct, named, None if amplified is None else Amplified(amplified))
    assert outcome.verdict(is_proven=proven).verdict == expected


def test_the_amplified_test_proves_no_dora() -> None:
    outcome = Outcome(UNSURE, PASSED, Amplified(PASSED), is_dora=True)
    found = outcome.verdict(is_proven=True)
    assert found.verdict == "inconclusive" and "magnitudes of DoRA" in found.detail
    assert Outcome(PASSED, PASSED, None, is_dora=True).verdict(is_proven=False).verdict == "passed"
    assert (
        Outcome(PASSED, PASSED, Amplified(FAILED), is_dora=True).verdict(is_proven=True).verdict == "failed"
    )


def test_fp32_is_held_to_fp32() -> None:
    prediction = Prediction(canaries(1e-6), 64.0, BASE + CHANGE, np.zeros(TOKENS))
    assert judge_amplified(prediction, BASE + CHANGE * (1 + 1e-5), FLOAT32).verdict.verdict == "passed"
    assert judge_amplified(prediction, BASE + CHANGE * (1 + 1e-3), FLOAT32).verdict.verdict == "failed"
