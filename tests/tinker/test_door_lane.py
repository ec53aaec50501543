"""The logs of one model as the door keeps and follows them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.lane import Lane
from lorad.tinker.log import LogWriter
from lorad.tinker.records import Created, Outcome, Result, Snapshot, Step, Stepped, Waiting


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(500):
        if await true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 5 s")


async def is_reason(lane: Lane, words: str) -> bool:
    return lane.reason() == words


async def forgotten(lane: Lane, seq: int) -> bool:
    """Whether the door only knows that the request has a result; it is sent late once more."""
    try:
        await lane.submit(seq, "whatever", Step(1e-3))
    except HttpError:
        return False
    return True


async def test_what_is_in_a_snapshot_is_forgotten(tmp_path: Path) -> None:
    lane = await Lane.open(tmp_path / "tinker")
    for seq in range(4):
        await lane.submit(seq, f"digest {seq}", Step(1e-3))
    with LogWriter(tmp_path / "tinker" / "results") as results:
        outcomes: list[Outcome] = [Created(), Stepped({"n": 1.0}), Stepped({"n": 2.0}), Snapshot(2)]
        for seq, outcome in zip((0, 1, 2, 2), outcomes, strict=True):
            results.append(Result(seq, time.time(), outcome))
        assert await lane.result(2, 5) == Stepped({"n": 2.0})
        await until(lambda: forgotten(lane, 1))
        assert (lane.waiting, await lane.result(1, 1)) == (1, Stepped({"n": 1.0}))
        with pytest.raises(HttpError, match="was another one"):
            await lane.submit(3, "another", Step(1e-3))
        results.append(Result(3, time.time(), Waiting("waits for a device")))
        await until(lambda: is_reason(lane, "waits for a device"))
    await lane.close()


async def test_a_missing_number_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.tinker.door.lane._HOLE_SECONDS", -1.0)
    lane = await Lane.open(tmp_path / "tinker")
    await lane.submit(0, "a", Step(1e-3))
    await lane.submit(2, "b", Step(1e-3))
    with LogWriter(tmp_path / "tinker" / "results") as results:
        results.append(Result(0, time.time(), Created()))
        await lane.result(0, 5)
        assert lane.reason() == "request 1 never came"
    await lane.close()
