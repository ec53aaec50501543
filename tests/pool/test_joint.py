"""Gradients of several runs that are asked for at once are made in the same passes, and reported to each
alone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from lorad.adapters.adapter import AdapterConfig
from lorad.errors import NotFound
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.pool.joint import Joint, JointCall
from lorad.protocol.batch import Gradients
from lorad.protocol.calls import ForwardBackward
from lorad.trainers.base import SlotSpec
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.kit.pool_kit import OPEN, TINY, batch


@pytest.fixture
async def trainer() -> AsyncIterator[BuiltinTrainer]:
    compute = Compute()
    made = BuiltinTrainer(load_base(TINY, torch.float32, torch.device("cpu")), compute)
    for slot in "abc":
        await made.open(slot, SlotSpec(AdapterConfig(OPEN.rank, OPEN.alpha, OPEN.modules), seed=ord(slot)))
    yield made
    compute.close()


def work_of(slot: str, seed: int) -> ForwardBackward:
    return msgspec.structs.replace(batch(seed), slot=slot)


class Watched(Joint):
    """Remembers who went together."""

    def __init__(self, trainer: BuiltinTrainer) -> None:
        super().__init__(trainer, joins=True)
        self.together: list[str] = []

    async def _gathered(self) -> list[JointCall]:
        calls = await super()._gathered()
        self.together += ["".join(asked.work.slot for asked in calls)] if calls else []
        return calls


async def test_joint_gradients_equal_separate_ones(
    trainer: BuiltinTrainer,
) -> None:
    joint = Watched(trainer)
    found = await asyncio.gather(*(joint.forward_backward(work_of(slot, ord(slot))) for slot in "abc"))
    grads = {slot: trainer._slots[slot].grads.clone() for slot in "abc"}
    assert joint.together == ["abc"]
    for slot, stats in zip("abc", found, strict=True):
        await trainer.discard_grads(slot)
        w = work_of(slot, ord(slot))
        alone = await trainer.forward_backward(w.slot, w.batch, w.targets, w.loss, w.normaliser)
        assert stats.loss == pytest.approx(alone.loss, rel=1e-4)
        torch.testing.assert_close(grads[slot], trainer._slots[slot].grads, rtol=1e-4, atol=1e-7)


async def test_bad_work_fails_alone(trainer: BuiltinTrainer) -> None:
    joint = Watched(trainer)
    wrong = msgspec.structs.replace(work_of("b", 1), normaliser=-1.0)
    words = msgspec.structs.replace(wrong.targets, advantages=wrong.targets.advantages.astype(str))
    no_numbers = msgspec.structs.replace(work_of("b", 1), targets=words)
    works = (work_of("a", 0), wrong, work_of("gone", 0), work_of("c", 2), no_numbers)
    found = await asyncio.gather(*map(joint.forward_backward, works), return_exceptions=True)
    assert joint.together == ["ac"]
    assert [type(one) for one in found] == [Gradients, ValueError, NotFound, Gradients, ValueError]


async def test_cancelled_caller_delays_nobody(trainer: BuiltinTrainer) -> None:
    joint = Watched(trainer)
    tasks = [asyncio.create_task(joint.forward_backward(work_of(slot, 0))) for slot in "ab"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert (await tasks[1]).tokens > 0
    with contextlib.suppress(asyncio.CancelledError):
        await tasks[0]


async def test_large_batches_go_by_themselves(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.pool.joint.MOST_TOKENS", 250)  # a batch has 120
    joint = Watched(trainer)
    await asyncio.gather(*(joint.forward_backward(work_of(slot, 0)) for slot in "abc"))
    assert joint.together == ["ab", "c"]
    monkeypatch.setattr("lorad.pool.joint.MOST_TOKENS", 100)
    await asyncio.gather(*(joint.forward_backward(work_of(slot, 0)) for slot in "abc"))
    assert joint.together == ["ab", "c"]


async def asks(joint: Joint, slot: str, passes: int) -> None:
    for seed in range(passes):
        await joint.forward_backward(work_of(slot, seed))


async def test_two_who_ask_in_turns_are_joined(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.pool.joint._SOON", 20.0)  # however busy the machine is
    joint = Watched(trainer)
    first = asyncio.create_task(asks(joint, "a", 8))
    for _ in range(10):  # its first pass begins
        await asyncio.sleep(0)
    await asyncio.gather(first, asks(joint, "b", 8))
    assert joint.together[:2] == ["a", "b"]
    assert sum(len(group) == 2 for group in joint.together) >= 4, joint.together


async def test_who_stays_away_is_waited_for_once(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorad.pool.joint._SOON", 1000.0)  # seconds, of a pass of some milliseconds
    joint = Watched(trainer)
    await asyncio.gather(asks(joint, "a", 3), asks(joint, "b", 3))
    assert set(joint.together) == {"ab"}
    waiting = asyncio.create_task(asks(joint, "a", 1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    joint.returns.forget("b")
    await asks(joint, "c", 1)
    await asyncio.gather(waiting, asks(joint, "a", 2))
    assert joint.together[-1] == "a"
