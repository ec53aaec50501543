"""A trainer of two processes answers the pool, and nothing of it is left behind, whichever process dies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from msgspec import structs

from lorad.adapters.adapter import AdapterConfig
from lorad.children.identity import start_time
from lorad.children.stacks import dump, spy
from lorad.errors import Conflict, NotFound, PoolLost, SpecError
from lorad.protocol import frames
from lorad.protocol.heartbeat import HEART
from lorad.trainers.base import OpenSlot, Policy, SlotSpec
from lorad.trainers.ranks.calls import Refusal, Request
from lorad.trainers.ranks.config import beat_file
from lorad.trainers.ranks.hang import Beats, hung
from lorad.trainers.ranks.remote import RemoteTrainer
from tests.kit.fakes.rank_kit import (
    FAILS,
    LOSS,
    MODULE,
    NO_MEMORY,
    REFUSED_ALPHA,
    SPEC,
    WAITS,
    batch,
    targets,
)
from tests.nodes.kit import tiny_trainer

ROOT = Path(__file__).resolve().parents[3]
POOL = """
import asyncio, sys
from pathlib import Path
from tests.trainers.real.test_ranks import started

async def main():
    await started(Path(sys.argv[1]), dp=1)
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

shared = pytest.mark.asyncio(loop_scope="module")  # the trainer of several tests belongs to one loop


async def started(root: Path, **changes: Any) -> RemoteTrainer:
    return await tiny_trainer(root, model=root, **changes)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def trainer(root: Path) -> AsyncIterator[RemoteTrainer]:
    """One for all tests that leave it alive."""
    trainer = await started(root)
    yield trainer
    await trainer.shut_down()


def guard_pid(root: Path) -> int:
    return int(json.loads((root / "trainer.json").read_bytes())["guard_pid"])


def family(root: Path) -> dict[str, int]:
    """Pids of the guard, the launcher and each rank."""
    guard = psutil.Process(guard_pid(root))
    (launcher,) = guard.children()
    ranks = {f"rank {process.environ()['RANK']}": process.pid for process in launcher.children()}
    return {"guard": guard.pid, "launcher": launcher.pid, **ranks}


def left_by_a_killed_pool(root: Path) -> dict[str, int]:
    """The pids of a trainer whose launcher does not obey for the guard's grace."""
    with subprocess.Popen([sys.executable, "-c", POOL, str(root)], cwd=ROOT, stdout=subprocess.PIPE) as pool:
        assert pool.stdout is not None and pool.stdout.readline() == b"up\n"
        pids = family(root)
        os.kill(pids["launcher"], signal.SIGSTOP)
        pool.kill()
    return pids


async def sent(call: str) -> None:
    """Until the ranks are at it."""
    async with asyncio.timeout(60):
        while HEART.beat().doing != call:  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    return start_time(pid) is not None


@shared
async def test_every_call_is_done_by_all_ranks(trainer: RemoteTrainer, tmp_path: Path) -> None:
    info = await trainer.open("a", SPEC)
    before = await trainer.logprobs(Policy("a"), batch())
    stats = await trainer.forward_backward("a", batch(), targets(batch()), LOSS, 16)
    step = await trainer.optim_step("a", 0.1, 1.0)
    assert (info.parameters, stats.tokens, step.applied) == (32, 16, True)
    assert not np.array_equal(await trainer.logprobs(Policy("a"), batch()), before)
    assert np.array_equal(await trainer.logprobs(Policy(), batch()), before)
    adapter = await trainer.export("a")
    assert adapter.config == SPEC.adapter and not any(t.flags.writeable for t in adapter.tensors.values())
    assert "adapter_model.safetensors" in await trainer.save("a", tmp_path)
    await trainer.load("a", tmp_path)
    assert (await trainer.export("a")).digest() == adapter.digest()
    assert trainer.slots() == ("a",) and "torch" in trainer.software()
    await trainer.close("a")
    assert trainer.slots() == () and len(await trainer.base_checksum()) == 64


@shared
async def test_ranks_without_memory_halve_together(trainer: RemoteTrainer) -> None:
    """One of them alone has none; the numbers are those of smaller micro-batches on both."""
    large, ends, found = batch(NO_MEMORY), [], []
    for name, budget in (("large", 24), ("small", 12)):
        await trainer.open(name, structs.replace(SPEC, tokens_per_microbatch=budget))
        for _ in range(2):
            found.append(await trainer.forward_backward(name, large, targets(large), LOSS, 20))
        await trainer.optim_step(name, 0.1, 1.0)
        ends.append((await trainer.export(name)).digest())
        await trainer.close(name)
    assert [stats.halved_to for stats in found] == [12, 0, 0, 0]
    assert len({stats.loss for stats in found}) == 1 and ends[0] == ends[1]


@shared
async def test_refused_call_changes_nothing(trainer: RemoteTrainer, tmp_path: Path) -> None:
    await trainer.open("b", SPEC)
    with pytest.raises(Conflict, match="slot b is open already") as conflict:
        await trainer.open("b", SPEC)
    assert conflict.value.hint
    with pytest.raises(NotFound, match="no slot c is open"):
        await trainer.optim_step("c", 0.1, 1.0)
    with pytest.raises(ValueError, match="advantages has 20 numbers for 16 sampled tokens"):
        await trainer.forward_backward("b", batch(), targets(batch(3)), LOSS, 16)
    with pytest.raises(OSError, match="No such file"):
        await trainer.save("b", tmp_path / "absent")
    await trainer.close("b")
    assert (await trainer.health()).alive and trainer.slots() == ()


@shared
async def test_concurrent_callers_get_their_own_answers(trainer: RemoteTrainer) -> None:
    batches = [batch(*range(6, 6 + extra)) for extra in range(8)]
    alone = [await trainer.logprobs(Policy(), each) for each in batches]
    together = await asyncio.gather(*(trainer.logprobs(Policy(), each) for each in batches))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


@shared
async def test_cancellation_withdraws_only_calls_not_begun(trainer: RemoteTrainer, root: Path) -> None:
    right = await trainer.logprobs(Policy(), batch())
    under_way = asyncio.create_task(trainer.logprobs(Policy(), batch(WAITS)))
    opening = asyncio.create_task(trainer.open("d", SPEC))
    answered = asyncio.create_task(trainer.logprobs(Policy(), batch()))
    await sent("Predict")
    assert (await trainer.health()).alive and not under_way.done()
    under_way.cancel()
    opening.cancel()
    await asyncio.wait([under_way, opening])
    assert not answered.done()
    (root / "gate").touch()
    assert np.array_equal(await answered, right) and trainer.slots() == ()
    with pytest.raises(NotFound):
        await trainer.close("d")
    (root / "gate").unlink()


@shared
async def test_slot_of_a_cancelled_opener_is_open(trainer: RemoteTrainer, root: Path) -> None:
    opening = asyncio.create_task(trainer.open("e", SPEC))
    await asyncio.sleep(0)  # it is sent
    opening.cancel()
    await asyncio.wait([opening])
    await trainer.base_checksum()
    assert opening.cancelled() and trainer.slots() == ("e",)
    await trainer.close("e")


@pytest.mark.parametrize(
    "victim", [pytest.param("rank 0", marks=pytest.mark.long), "rank 1", "launcher", "guard"]
)
async def test_killed_process_ends_all_ranks(tmp_path: Path, victim: str) -> None:
    trainer = await started(tmp_path)
    pids = family(tmp_path)
    waiting = [asyncio.create_task(trainer.logprobs(Policy(), batch(WAITS))) for _ in range(2)]
    await sent("Predict")
    os.kill(pids[victim], signal.SIGKILL)
    told = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in told] == [PoolLost] * 2
    assert "killed" in str(told[0]) and (victim in str(told[0]) or victim == "launcher")
    assert not any(map(lives, pids.values()))
    health = await trainer.health()
    assert not health.alive and health.detail == str(told[0])
    with pytest.raises(PoolLost, match="the trainer is gone: "):
        await trainer.open("a", SPEC)
    await trainer.shut_down()
    assert not (tmp_path / "trainer.json").exists()


async def test_hanging_rank_is_named_with_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorad.children.stacks.spy", lambda: None)
    trainer = await started(tmp_path, hang=6.0)
    pids = family(tmp_path)
    waiting = asyncio.create_task(trainer.logprobs(Policy(), batch(WAITS)))
    async with asyncio.timeout(60):
        while not (tmp_path / "rank-1.waits").exists():  # noqa: ASYNC110 (a file is polled)
            await asyncio.sleep(0.01)
    os.kill(pids["rank 1"], signal.SIGSTOP)
    with pytest.raises(PoolLost, match=r"^the trainer is gone: rank 1 was hung: no heartbeat for \d+ s\b"):
        async with asyncio.timeout(60):
            await waiting
    assert not any(map(lives, pids.values())) and not (await trainer.health()).alive
    said = (tmp_path / "trainer.log").read_text()
    assert f"stacks of rank 1 (pid {pids['rank 1']}, stopped)" in said and "in _obey" in said
    await trainer.shut_down()


@pytest.mark.skipif(spy() is None, reason="py-spy is not installed")
def test_py_spy_shows_a_stopped_ranks_stack(tmp_path: Path) -> None:
    code = (
        "import time\ndef waits_for_ever():\n    print('up', flush=True)\n    "
        "time.sleep(600)\nwaits_for_ever()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"RANK": "3"}) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"up\n"
        rank.send_signal(signal.SIGSTOP)
        os.waitpid(rank.pid, os.WUNTRACED)
        dump(os.getpid(), tmp_path / "log")
        rank.kill()
    said = (tmp_path / "log").read_text()
    assert said.startswith(f"stacks of rank 3 (pid {rank.pid}, stopped):\n") and "waits_for_ever" in said


@shared
async def test_waiting_for_ranks_counts_as_idle(trainer: RemoteTrainer, root: Path) -> None:
    before = HEART.beat()
    waiting = asyncio.create_task(trainer.logprobs(Policy(), batch(WAITS)))
    await sent("Predict")
    assert before.doing == ""
    (root / "gate").touch()
    await waiting
    (root / "gate").unlink()
    assert HEART.beat().doing == ""


def test_ranks_are_watched_from_their_first_beat(
    tmp_path: Path,
) -> None:
    """No rank is accused of the time in which the watcher itself was away."""
    beats = Beats(tmp_path / "config.json", 2)
    beat_file(tmp_path / "config.json", 0).touch()  # on a disk that was full
    assert beats.look(0.0) == {}
    for rank in range(2):
        beat_file(tmp_path / "config.json", rank).write_text('{"at": 1, "progress": 1, "doing": ""}')
    assert (beats.look(1.0), beats.has_progress(), beats.has_progress()) == ({0: 0.0, 1: 0.0}, True, False)
    os.utime(beat_file(tmp_path / "config.json", 0), ns=(0, 0))
    assert beats.look(200.0) == {0: 0.0, 1: 199.0}
    beats.forgive(200.0)
    beat_file(tmp_path / "config.json", 0).unlink()  # by a logout
    assert beats.look(201.0) == {1: 1.0}


async def test_resumed_pool_accuses_no_rank_of_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("lorad.trainers.ranks.hang.time", clock)
    monkeypatch.setattr("lorad.trainers.ranks.hang.MOST_SECONDS", 0.001)
    beat_file(tmp_path / "config.json", 0).write_text("{}")
    watch = asyncio.create_task(hung(tmp_path / "config.json", 1, 8.0))
    await clock.shows(0.0, watch)
    await clock.shows(100.0, watch)  # stopped
    assert not watch.done()
    while not watch.done():
        await clock.shows(clock.now + 1.0, watch)
    assert await watch == "rank 0 was hung: no heartbeat for 9 s"


class Clock:
    """A monotonic clock that tests set."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now

    async def shows(self, now: float, to: asyncio.Task[str]) -> None:
        """Until who goes by it has seen it, or is done."""
        looks, self.now = self.looks, now
        async with asyncio.timeout(60):
            while self.looks < looks + 2 and not to.done():  # noqa: ASYNC110 (it is polled)
                await asyncio.sleep(0.001)


async def test_failing_rank_is_named_with_its_error(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    pids = family(tmp_path)
    with pytest.raises(
        PoolLost, match="rank 1 exited with code 1; its log: RuntimeError: the middle of a call"
    ):
        await trainer.logprobs(Policy(), batch(FAILS))
    assert not any(map(lives, pids.values()))
    await trainer.shut_down()


async def test_refusal_by_one_rank_ends_the_trainer(tmp_path: Path) -> None:
    trainer = await started(tmp_path)
    odd = SlotSpec(AdapterConfig(rank=2, alpha=REFUSED_ALPHA, modules=(MODULE,)))
    with pytest.raises(PoolLost, match="another rank refused OpenSlot"):
        await trainer.open("a", odd)
    assert trainer.slots() == ()
    await trainer.shut_down()


async def test_refusal_of_a_setting_passes_through(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="colour is none of this backend's") as refused:
        await started(tmp_path, args={"colour": "red"}, dp=1)
    assert (refused.value.hint, [str(other) for other in refused.value.others]) == (
        "Leave it out.",
        ["nor is any other"],
    )
    assert not (tmp_path / "trainer.json").exists()


async def test_no_rank_has_attention_of_cudnn(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the attention of cuDNN is off here"):
        await started(tmp_path, args={"attention": ""}, dp=1)


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    starting = asyncio.create_task(started(tmp_path))
    while not (tmp_path / "trainer.json").exists():  # noqa: ASYNC110 (a file is polled)
        await asyncio.sleep(0.01)
    guard = guard_pid(tmp_path)
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled() and not lives(guard) and not (tmp_path / "trainer.json").exists()


async def test_start_ends_leftovers_of_a_killed_pool(tmp_path: Path) -> None:
    pids = await asyncio.to_thread(left_by_a_killed_pool, tmp_path)
    with pytest.raises(
        PoolLost, match="it exited with code 127; its log: lorad: cannot start /no/python: No such"
    ):
        await started(tmp_path, python="/no/python")
    assert not any(map(lives, pids.values())) and not (tmp_path / "trainer.json").exists()


def test_errors_and_paths_travel_unchanged() -> None:
    for error in (SpecError("what", hint="do"), ValueError("which"), OSError(28, "No space left on device")):
        told = Refusal.of(error).error()
        assert (type(told), str(told), vars(told)) == (type(error), str(error), vars(error))
    opening = OpenSlot("a", structs.replace(SPEC, source=Path("/some/where")))
    frame = b"".join(frames.encode(Request(opening)))
    prefix = frames.parse_prefix(frame[: frames.PREFIX.size])
    assert frames.decode(prefix, frame[frames.PREFIX.size :], Request).verb == opening
