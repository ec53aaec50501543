"""Requests that arrive while others are decoded: rows stay busy as long as anybody waits.

Counted in decode steps.
"""

import pytest

from benchmarks.rollout.arrivals import Arrival, Trace, random_arrivals, traced
from lorad.engines.builtin import engine

ROWS = 16


@pytest.fixture(autouse=True)
def one_step_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "QUANTUM", 0.0)


def crowd() -> list[Arrival]:
    """More than the rows can serve at once, of very uneven lengths."""
    return random_arrivals(100, per_step=1.5, mean=16, cap=64)


async def crowded() -> Trace:
    return await traced(crowd(), ROWS)


@pytest.mark.system
async def test_rows_stay_busy_while_somebody_waits() -> None:
    trace = await crowded()
    assert sum(waiting > 0 for waiting in trace.waiting) > 40
    assert max(trace.rows) == ROWS
    assert trace.occupancy >= 0.9


async def test_crowd_takes_half_the_steps_of_padding() -> None:
    lengths = [arrival.tokens for arrival in crowd()]
    padded = sum(max(lengths[first : first + ROWS]) for first in range(0, len(lengths), ROWS))
    assert len((await crowded()).rows) <= padded / 2


async def test_every_request_gets_all_its_tokens() -> None:
    assert (await crowded()).lengths == [arrival.tokens for arrival in crowd()]


@pytest.mark.system
async def test_the_trace_is_the_same_every_time() -> None:
    assert await crowded() == await crowded()


@pytest.mark.system
async def test_nobody_waits_while_rows_are_free() -> None:
    trace = await traced(random_arrivals(40, per_step=0.4, mean=16, cap=64), ROWS)
    assert max(trace.rows) < ROWS
    assert all(waiting <= 2 for waiting in trace.waiting)
