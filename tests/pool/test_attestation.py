"""Attestation: every fault in what an engine serves is found, and nothing else is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lorad.errors import AttestationFailed
from lorad.models.facts import weights_sha256
from lorad.pool.attest.canaries import Canaries
from lorad.pool.attest.direct import BFLOAT16, FLOAT32, Tolerances, judge
from lorad.protocol.batch import Batch
from lorad.protocol.calls import Nothing, Published
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import HEART
from lorad.protocol.pool_setup import Quantize
from tests.kit.pool_kit import OPEN, TINY, generate, learn, publish, running_pool

WORDS = {
    "ServesBase": "like the base",
    "ServesPrevious": "like the previous version",
    "DoublesScale": "",
    "DropsTarget": "other tensors",
    "RollsA": "",
    "TransposesA": "",
    "ServesNaN": "not finite",
}


@contextmanager
def opened_pool(
    directory: Path, engine: str | None = None, dtype: str = "float32", quantize: Quantize | None = None
) -> Iterator[Connection]:
    """A run with an open slot, in a pool of its own."""
    directory.mkdir(exist_ok=True)
    changes = {"engine_class": f"tests.kit.fakes.faulty_engines:{engine}"} if engine else {}
    with (
        running_pool(directory, dtype=dtype, quantize=quantize, **changes) as running,
        running.connect("sorter") as connection,
    ):
        connection.call("open", OPEN)
        yield connection


def test_an_open_slot_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(HEART, "tell", told.append)
    with opened_pool(tmp_path):
        counts = told[told.index("opening the slot of sorter") + 1 :]
    tokens = [int(text.split()[-3]) for text in counts if text.startswith("comparing engine and trainer ")]
    assert tokens[0] == 0 and len(set(tokens)) > 2 and tokens == sorted(tokens) and counts[-1] == ""


def publish_until(connection: Connection, directory: Path, number: int, lr: float) -> Published:
    """Versions 0 to `number`, one step apart."""
    for earlier in range(number):
        publish(connection, directory, earlier)
        learn(connection, seed=earlier, lr=lr)
    return publish(connection, directory, number)


@pytest.mark.system(but=["ServesBase-1e-05", "ServesPrevious-0.001", "DropsTarget-1e-05", "RollsA-0.001"])
@pytest.mark.parametrize(
    ("fault", "lr"),
    [(fault, lr) for fault in WORDS for lr in (1e-3, 1e-5) if (fault, lr) != ("ServesNaN", 1e-5)],
)
def test_a_fault_in_what_is_served_is_found(fault: str, lr: float, tmp_path: Path) -> None:
    with opened_pool(tmp_path, fault) as connection:
        publish_until(connection, tmp_path, 1, lr)
        learn(connection, seed=1, lr=lr)
        with pytest.raises(AttestationFailed, match=rf"sorter@2 failed its attestation: .*{WORDS[fault]}"):
            publish(connection, tmp_path, 2)
        assert connection.call("status", Nothing()).loaded == ["sorter@0", "sorter@1"]
        assert {chunk.version for chunk in generate(connection, "sorter@1")} == {"sorter@1"}


@pytest.mark.system
@pytest.mark.parametrize("lr", [pytest.param(1e-3, marks=pytest.mark.long), 1e-5])
def test_stale_version_is_found_after_small_steps(lr: float, tmp_path: Path) -> None:
    expected = pytest.raises(AttestationFailed, match=r"sorter@24 .*like the previous version")
    with opened_pool(tmp_path, "ServesPreviousLate") as connection, expected:
        publish_until(connection, tmp_path, 24, lr)


def test_a_doubled_scale_is_named(tmp_path: Path) -> None:
    expected = pytest.raises(AttestationFailed, match="twice its scale")
    with opened_pool(tmp_path, "DoublesScale") as connection, expected:
        publish_until(connection, tmp_path, 2, lr=1e-5)


def test_an_engine_that_got_other_bytes_is_found(tmp_path: Path) -> None:
    expected = pytest.raises(AttestationFailed, match="the engine received sha256")
    with opened_pool(tmp_path, "SaysWhatItGot") as connection, expected:
        publish(connection, tmp_path, 0)


def test_engine_with_another_base_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(AttestationFailed, match="disagree about the base"),
        opened_pool(tmp_path, "AnotherBase"),
    ):
        pass


@pytest.mark.system(but="fp8")
@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_engine_with_unrounded_base_is_refused(form: Quantize, tmp_path: Path) -> None:
    with opened_pool(tmp_path / "clean", quantize=form) as connection:
        published = publish_until(connection, tmp_path, 1, lr=1e-3)
        assert published.attestation.verdict == "passed"
        info = connection.call("status", Nothing()).info
        assert info.model_sha256 == weights_sha256(TINY, form) != weights_sha256(TINY)
    with (
        pytest.raises(AttestationFailed, match="disagree about the base"),
        opened_pool(tmp_path / "faulty", "ServesUnrounded", quantize=form),
    ):
        pass


@pytest.mark.system(but="0.001")
@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_thirty_clean_versions_pass(lr: float, tmp_path: Path) -> None:
    verdicts = []
    with opened_pool(tmp_path) as connection:
        for number in range(31):
            verdicts.append(publish(connection, tmp_path, number).attestation.verdict)
            learn(connection, seed=number, lr=lr)
    assert verdicts == ["passed"] * 31


@pytest.mark.system
@pytest.mark.parametrize("lr", [pytest.param(1e-3, marks=pytest.mark.long), 1e-5])
def test_bfloat16_is_not_blind(lr: float, tmp_path: Path) -> None:
    with opened_pool(tmp_path, dtype="bfloat16") as connection:
        assert publish_until(connection, tmp_path, 8, lr).attestation.verdict == "passed"


def test_bfloat16_says_when_it_is_blind(tmp_path: Path) -> None:
    with opened_pool(tmp_path, dtype="bfloat16") as connection:
        publish(connection, tmp_path, 0)
        learn(connection, lr=1e-5)
        publish(connection, tmp_path, 1)
        again = publish(connection, tmp_path, 2).attestation
    assert again.verdict == "inconclusive" and "previous version" in again.detail


def test_a_first_version_equals_the_base_and_passes(tmp_path: Path) -> None:
    with opened_pool(tmp_path) as connection:
        attestation = publish(connection, tmp_path, 0).attestation
    assert attestation.verdict == "passed" and "changes nothing" in attestation.detail
    assert attestation.facts["largest"] < 1e-4


def test_a_change_below_the_noise_is_inconclusive(tmp_path: Path) -> None:
    with opened_pool(tmp_path) as connection:
        attestation = publish_until(connection, tmp_path, 1, lr=1e-8).attestation
    assert attestation.verdict == "inconclusive" and "too little signal" in attestation.detail


def test_canaries_are_reproducible_and_mostly_uncertain(tmp_path: Path) -> None:
    made = []
    for directory in (tmp_path / "a", tmp_path / "b"):
        with running_pool(directory) as running, running.connect("sorter") as connection:
            connection.call("open", OPEN)
            made.append(running.pool.tenants["sorter"].canaries)
    probabilities = np.exp(made[0].engine)
    assert np.array_equal(made[0].batch.completions, made[1].batch.completions)
    assert made[0].tokens == OPEN.canaries * OPEN.canary_tokens
    assert np.mean((probabilities > 0.01) & (probabilities < 0.9)) > 0.5


def test_canaries_have_no_tokens_of_images(tmp_path: Path) -> None:
    images: frozenset[int] = frozenset()
    for directory in (tmp_path / "without", tmp_path / "with"):
        with running_pool(directory) as running, running.connect("sorter") as connection:
            running.pool.attester.placeholders = images
            connection.call("open", OPEN)
            batch = running.pool.tenants["sorter"].canaries.batch
        assert not images.intersection([*batch.prompts, *batch.completions])
        images = frozenset({int(batch.prompts[0]), int(batch.completions[0])})


def synthetic(base: np.ndarray, sigma: float) -> Canaries:
    """Canaries without texts: what both sides say of the base."""
    zeros = np.zeros(1, np.int32)
    batch = Batch(zeros, zeros, zeros, np.zeros(base.size, np.int32), zeros)
    return Canaries(batch, base, base, sigma)


def test_previous_version_is_found_though_almost_right() -> None:
    """The previous version differs by 2 %, less than bfloat16 lets rel see; z sees it."""
    rng = np.random.default_rng(0)
    base, before, step = rng.normal(-2, 1, 192), rng.normal(0, 1, 192), rng.normal(0, 0.02, 192)
    verdict = judge(synthetic(base, 1e-3), base + before, base + before + step, before, BFLOAT16)
    assert verdict.verdict == "failed" and "previous version" in verdict.detail
    assert verdict.facts["rel"] < verdict.facts["rel_limit"]


def test_wrong_direction_is_found_however_small() -> None:
    rng = np.random.default_rng(0)
    base, change, other = rng.normal(-2, 1, 192), rng.normal(0, 1e-3, 192), rng.normal(0, 1e-5, 192)
    aside = other - change * (other @ change) / (change @ change)
    verdict = judge(synthetic(base, 1e-7), base + change + aside, base + change, np.zeros(192), FLOAT32)
    assert verdict.verdict == "failed" and "rel" in verdict.detail
    assert verdict.facts["largest"] < FLOAT32.largest and verdict.facts["z_error"] < 1e-6


@pytest.mark.parametrize(("limits", "sigma"), [(FLOAT32, 7e-7), (BFLOAT16, 9e-3), (BFLOAT16, 5e-2)])
@pytest.mark.parametrize("signal", [0.0, 0.1, 1.0, 10.0, 300.0])
def test_noise_alone_never_fails_a_version(limits: Tolerances, sigma: float, signal: float) -> None:
    """signal: rms of the change in sigma; both sides are as noisy as they were under the base."""
    rng = np.random.default_rng(0)

    def noisy(exact: np.ndarray) -> np.ndarray:
        return exact + rng.normal(0, sigma / np.sqrt(2), exact.size)

    for _ in range(200):
        base = rng.normal(-2, 1, 192)
        before = rng.normal(0, signal * sigma, 192)
        now = before + rng.normal(0, 0.05 * signal * sigma, 192)
        canaries = msgspec.structs.replace(synthetic(noisy(base), sigma), trainer=noisy(base))
        previous = noisy(base + before) - canaries.trainer
        verdict = judge(canaries, noisy(base + now), noisy(base + now), previous, limits)
        assert verdict.verdict != "failed", verdict
