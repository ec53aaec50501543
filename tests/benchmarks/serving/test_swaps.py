"""The benchmark of swaps sees what it is there to see."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit import ours
from benchmarks.kit.workload import TINY
from benchmarks.serving import swapping
from benchmarks.serving.publish_row import Laps, medians
from benchmarks.serving.swaps import ROWS, faults


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "WARM_UP_SECONDS", 0.1)
    monkeypatch.setattr(swapping, "QUIET_SECONDS", 0.1)


async def measured(engine: Any, work: Path) -> dict[str, Any]:
    found, traffic = await swapping.swapped(engine, 3, 4, work)
    return {**found, **swapping.judged(list(traffic.samples.values()), 3, 4, work)}


async def test_swaps_of_a_correct_engine_have_no_fault(tmp_path: Path) -> None:
    async with ours.opened(TINY, mix_calls=True) as held:
        found = await measured(held.engine, tmp_path)
    found["processes_left"] = []  # this process may have children of other tests
    assert faults(found) == [] and found["crossed"] and found["requests"]
    assert all(cell(found) for _, cell in ROWS)


async def test_sample_labelled_with_another_version_is_detected(tmp_path: Path) -> None:
    async with ours.opened(TINY) as held:
        traffic = swapping.Traffic(held.engine, 1, "swap")
        for version in (0, 1):
            await swapping.load(traffic, version)
        sample, _ = await traffic.ask("r", 1)
        lying = [swapping.Sample(0, sample.prompt, sample.tokens, sample.logprobs, True)]
        assert swapping.judged(lying, 1, 1, tmp_path)["right"] > 0.1


def test_the_slope_is_of_the_second_half() -> None:
    assert swapping.slope([0.0, 50.0, 90.0, 100.0, 102.0, 104.0, 106.0]) == pytest.approx(2.0)
    assert swapping.slope([1.0]) == 0.0


def test_every_fault_is_named() -> None:
    good = {"failed": 0, "mixed": 0, "still_loaded": [], "leftovers": [], "processes_left": []}
    good |= {"own_score_difference": 1e-6, "right": 1e-6, "wrong": 3.0}
    assert faults(good) == []
    assert faults({**good, "failed": 1, "leftovers": ["x"], "right": 2.0}) == ["failed", "leftovers", "right"]
    assert faults({**good, "own_score_difference": float("nan")}) == ["own_score_difference"]


def test_a_publish_is_the_median_of_whole_turns() -> None:
    laps = [
        Laps({"load": load, "first token": 1.0}, 10.0, cpu)
        for load, cpu in ((5.0, 3.0), (9.0, 2.0), (1.0, 9.0))
    ]
    made = medians(laps)
    assert (made["ms"], made["cpu_ms"], made["phases"]["load"], made["megabytes"]) == (6.0, 3.0, 5.0, 10.0)
