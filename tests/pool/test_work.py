"""What the trainer's work comes to: tokens, memory, the share of what its devices could compute."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lorad.driver.attempt.metrics import trainer_metrics
from lorad.pool.work import WorkDone, WorkRate, peak_of, tokens_of
from lorad.protocol.batch import Batch
from lorad.protocol.calls import Nothing, Stepped
from lorad.protocol.status import PoolStatus, TrainerStatus
from lorad.trainers.base import TrainerHealth
from tests.kit.pool_kit import running_pool

BATCH = Batch.of([(np.zeros(5, np.int32), [np.zeros(3, np.int32), np.zeros(4, np.int32)])])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_are_of_the_very_gpu(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_sample_is_computed_with_its_prompt() -> None:
    assert tokens_of(BATCH) == 5 + 3 + 5 + 4


def test_flops_count_forward_backward_and_recomputation() -> None:
    rate = WorkRate(parameters=1000, peak=1e6)
    assert rate.share(100, 1.0, recomputes=False) == pytest.approx(4 * 1000 * 100 / 1e6)
    assert rate.share(100, 2.0, recomputes=True) == pytest.approx(6 * 1000 * 100 / 2e6)


def test_each_run_takes_its_own_work_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    done = WorkDone(cast("Any", None), WorkRate(1000, 1e6))
    for run in ("a", "b", "a"):
        with done.measured(run, BATCH):
            pass
    found, mfu = done.take("a", recomputes=False)
    assert (found.tokens, found.seconds) == (34, 2.0) and mfu == pytest.approx(4 * 1000 * 34 / 2e6)
    assert done.take("a", recomputes=False)[1] is None and done.take("b", recomputes=False)[0].tokens == 17


class Trainer:
    """A trainer that resets its peak once it was reported, as the protocol has it."""

    peaks = iter([5, 9, 3, 4])

    async def health(self) -> TrainerHealth:
        return TrainerHealth(memory=2, memory_peak=next(self.peaks))


async def test_looking_meanwhile_keeps_the_steps_peak() -> None:
    done = WorkDone(cast("Any", Trainer()), None)
    await done.health()
    assert (await done.health()).memory_peak == 9
    assert await done.take_memory() == (2, 9)
    assert await done.take_memory() == (2, 4)


def test_status_has_what_the_trainer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def health() -> TrainerHealth:
        return TrainerHealth(detail="rank 1 waits", memory=2, memory_peak=9)

    with running_pool(tmp_path) as running, running.connect() as connection:
        monkeypatch.setattr(running.pool.work, "health", health)
        status: PoolStatus = connection.call("status", Nothing())
    assert status.trainer == TrainerStatus(True, "rank 1 waits", here=True, memory=2, memory_peak=9)


def test_rates_of_several_updates_are_time_weighted() -> None:
    first = Stepped(1.0, True, tokens=100, seconds=1.0, mfu=0.1, memory=5, memory_peak=9)
    second = Stepped(1.0, True, tokens=500, seconds=3.0, mfu=0.5, memory=6, memory_peak=7)
    assert trainer_metrics([first, second]) == {
        "trainer_tokens_per_second": 150.0,
        "trainer_memory": 6.0,
        "trainer_memory_peak": 9.0,
        "mfu": pytest.approx(0.4),
    }
    assert trainer_metrics([Stepped(1.0, True)]) == {}
