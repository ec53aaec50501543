"""The logs of one model as the door keeps and follows them."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lorad.tinker.door import models
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.lane import LaneClient
from lorad.tinker.lane import state
from lorad.tinker.lane.state import EarlierResults, shorten
from lorad.tinker.log import LogWriter, read
from lorad.tinker.records import (
    Created,
    Failed,
    Outcome,
    Request,
    Result,
    Saved,
    Snapshot,
    Step,
    Stepped,
    Waiting,
)
from tests.tinker.door_kit import home_with_keys, running_door


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(500):
        if await true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 5 s")


async def opened(directory: Path) -> LaneClient:
    await asyncio.to_thread(directory.mkdir, exist_ok=True)
    lane = LaneClient(directory)
    await lane.wake()
    return lane


async def is_reason(lane: LaneClient, words: str) -> bool:
    return lane.reason() == words


async def forgotten(lane: LaneClient, seq: int) -> bool:
    """Whether the door only knows that the request has a result; it is sent late once more."""
    try:
        await lane.submit(seq, "whatever", Step(1e-3))
    except HttpError:
        return False
    return True


async def test_what_is_in_a_snapshot_is_forgotten(tmp_path: Path) -> None:
    lane = await opened(tmp_path / "tinker")
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
    await lane.sleep()


async def test_a_missing_number_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.tinker.door.lane._HOLE_SECONDS", -1.0)
    lane = await opened(tmp_path / "tinker")
    await lane.submit(0, "a", Step(1e-3))
    await lane.submit(2, "b", Step(1e-3))
    with LogWriter(tmp_path / "tinker" / "results") as results:
        results.append(Result(0, time.time(), Created()))
        await lane.result(0, 5)
        assert lane.reason() == "request 1 never came"
    await lane.sleep()


def write_results(run: Path, *outcomes: Outcome, first: int = 0) -> None:
    """Write so many results, two a segment."""
    with LogWriter(run / "tinker" / "results", segment=130) as results:
        for seq, outcome in enumerate(outcomes, first):
            results.append(Result(seq, time.time(), outcome))


def checkpoint(run: Path, seq: int) -> None:
    """Old results up to there go."""
    with LogWriter(run / "tinker" / "results", segment=1) as results:
        results.append(Result(seq, time.time(), Snapshot(1)))
        shorten(results, run, seq)


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run whose results are old at once; two of its three checkpoints have files."""
    monkeypatch.setattr(state, "_KEPT", -1.0)
    for name in ("tinker/requests", "kept", "again"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


CHECKPOINTS = (Saved("a", "kept"), Saved("b", "gone"), Saved("c", "again"))


async def test_old_results_go_and_checkpoints_stay(short: Path) -> None:
    lane = await opened(short / "tinker")
    await submit(lane, 0, 1, 2, 3, 4)
    drop_requests(short)
    await submit(lane, 5)
    a, b, c = CHECKPOINTS
    write_results(short, Created(), a, b, Stepped({}), c, Stepped({"n": 5.0}))
    await lane.result(5, 5)
    checkpoint(short, 5)
    await until(lambda: is_gone(lane, 3))
    assert await lane.result(5, 5) == Stepped({"n": 5.0})
    drop_requests(short)
    write_results(short, Stepped({}), first=6)
    await lane.result(6, 5)
    checkpoint(short, 6)
    await until(lambda: is_gone(lane, 6))
    await until(lambda: is_result(lane, 1, CHECKPOINTS[0]))
    await lane.sleep()
    again = await opened(lane.directory)
    assert await again.result(1, 5) == CHECKPOINTS[0] and again.knows(1)
    assert ([result.seq for result in again.saved], again.last) == ([1, 4], 6)
    await again.sleep()


async def submit(lane: LaneClient, *seqs: int) -> None:
    for seq in seqs:
        await lane.submit(seq, f"digest {seq}", Step(1e-3))


def drop_requests(run: Path) -> None:
    """Empty the log of requests, as if the door had dropped a segment for each."""
    for path in (run / "tinker" / "requests").iterdir():
        path.write_bytes(b"")


async def is_result(lane: LaneClient, seq: int, outcome: Outcome) -> bool:
    return await lane.result(seq, 1) == outcome


async def is_gone(lane: LaneClient, seq: int) -> bool:
    outcome = await lane.result(seq, 1)
    return isinstance(outcome, Failed) and f"request {seq} is gone" in outcome.message


def test_results_stay_with_their_requests(short: Path) -> None:
    """A lane that goes back to an older checkpoint has to know what failed."""
    with LogWriter(short / "tinker" / "requests") as requests:
        for seq in (3, 2):
            requests.append(Request(seq, time.time(), "", Step(1e-3)))
    write_results(short, *[Stepped({})] * 5)
    checkpoint(short, 4)
    assert seqs_of(short) == [2, 3, 4, 4]


def seqs_of(run: Path) -> list[int]:
    return [result.seq for result, _ in read(run / "tinker" / "results", Result)]


def test_young_results_stay(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_KEPT", 3600.0)
    write_results(short, *[Stepped({})] * 5)
    checkpoint(short, 4)
    assert seqs_of(short) == [0, 1, 2, 3, 4, 4]


def test_an_attempt_reads_results_behind_its_checkpoint(short: Path) -> None:
    write_results(short, Created(), Failed("no"), Stepped({}), Snapshot(1), Failed("no"))
    results = short / "tinker" / "results"
    assert EarlierResults.read(results, 0) == EarlierResults({1: True, 2: False, 4: True}, 3)
    assert EarlierResults.read(results, 3) == EarlierResults({4: True}, -1)


async def test_an_idle_lane_sleeps_until_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_IDLE", -1.0)
    async with running_door(home_with_keys(tmp_path / "home")) as world:
        alice = world.alice
        model = await alice.model(await alice.session())
        lane = await world.door.models.lane(world.door.state.models[model])
        before = open_files(lane)
        await world.door.models.rest()
        assert (before, open_files(lane), lane.is_asleep) == (2, 0, True)
        first = await alice.result(await alice.send("optim_step", model, 1, adam_params={}))
        assert first == {"metrics": {"seq": 1.0}} and not lane.is_asleep
        await world.door.models.rest()
        assert await alice.result(f"{model}:1") == first


async def test_few_lanes_are_awake_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_MOST_AWAKE", 2)
    async with running_door(home_with_keys(tmp_path / "home")) as world:
        alice, session = world.alice, await world.alice.session()
        made = [await alice.model(session, number) for number in range(4)]
        for seq in (1, 2):
            sent = [await alice.send("optim_step", model, seq, adam_params={}) for model in made]
            for request in sent:
                assert await alice.result(request) == {"metrics": {"seq": float(seq)}}
        lanes = [await world.door.models.results(world.door.state.models[model]) for model in made]
        assert sum(not lane.is_asleep for lane in lanes) == 2


def open_files(lane: LaneClient) -> int:
    """Count the descriptors of this process below a lane's directory."""
    there = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_open(name)]
    return sum(path.startswith(str(lane.directory / "requests")) for path in there)


def is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")
