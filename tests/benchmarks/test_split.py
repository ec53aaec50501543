"""What a journal says of when the parts of steps were."""

from typing import Any

import pytest

from benchmarks.training.split import seconds_a_step, timeline
from lorad.protocol.journal import Record

STEPS = 6


def facts(*of: tuple[str, int, float, dict[str, Any]]) -> list[Record]:
    return [Record(1, seq, "r", 1, step, kind, at, data) for seq, (kind, step, at, data) in enumerate(of)]


def step(number: int, at: float, ahead: int, waited: float) -> list[tuple[str, int, float, dict[str, Any]]]:
    """Two seconds of sampling, one of training, one of publishing."""
    seconds = {"sampling": 2.0, "train": 1.0, "publish": 1.0, "sample": waited}
    metrics = {f"seconds_{name}": value for name, value in seconds.items()} | {"staleness": ahead}
    return [("version", number, at, {}), ("step", number, at, {"metrics": metrics})]


BEGIN: list[tuple[str, int, float, dict[str, Any]]] = [("attempt", 0, 10.0, {}), ("version", 0, 10.0, {})]


def test_steps_one_after_another_share_no_second() -> None:
    made = [fact for n in range(1, STEPS + 1) for fact in step(n, 10.0 + 4 * n, 0, 2.0)]
    steps = timeline(facts(*BEGIN, *made))
    assert [part.sampled for part in steps] == [(10.0 + 4 * n, 12.0 + 4 * n) for n in range(STEPS)]
    assert {part.together for part in steps} == {0.0} and seconds_a_step(steps) == pytest.approx(4)


def test_steps_ahead_are_sampled_while_others_train() -> None:
    made = step(1, 14.0, 0, 2.0)
    made += [fact for n in range(2, STEPS + 1) for fact in step(n, 12.0 + 2 * n, 1, 0.0)]
    steps = timeline(facts(*BEGIN, *made))
    assert [part.sampled[0] for part in steps] == [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    assert [part.trained for part in steps[:3]] == [(12.0, 13.0), (14.0, 15.0), (16.0, 17.0)]
    assert [part.together for part in steps] == [2.0] * 5 + [0.0] and seconds_a_step(steps) == pytest.approx(
        2
    )


def test_steps_after_a_resume_begin_with_it() -> None:
    again = [("rewind", 1, 90.0, {"to": 1}), ("attempt", 1, 100.0, {}), ("version", 1, 100.0, {})]
    again += step(2, 104.0, 1, 2.0)
    steps = timeline(facts(*BEGIN, *step(1, 14.0, 0, 2.0), *step(2, 16.0, 1, 0.0), *again))
    assert [part.sampled for part in steps] == [(10.0, 12.0), (100.0, 102.0)]
    assert [part.published for part in steps] == [(13.0, 14.0), (103.0, 104.0)]
