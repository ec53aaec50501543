"""A run's critic in the pool: beside the slot, saved with it, closed with it, never published."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lorad.adapters.directory import commit
from lorad.errors import Conflict, IntegrityError
from lorad.pool.tenants import critic_slot
from lorad.protocol.batch import LossStats, ValueLoss, ValueTargets
from lorad.protocol.calls import (
    CRITIC,
    Evict,
    Nothing,
    OpenCritic,
    Opened,
    OptimStep,
    Save,
    Saved,
    Stepped,
    ValueBackward,
    Values,
)
from lorad.protocol.connection import Connection
from lorad.protocol.status import PoolInfo, PoolStatus
from tests.kit.pool_kit import OPEN, Running, batch, generate, learn, publish, texts

pytest_plugins = ["tests.kit.pool_fixtures"]
WITH_CRITIC = replace(OPEN, critic=OpenCritic(rank=4, alpha=8.0))


def values(run: Connection, seed: int = 0) -> np.ndarray:
    found: np.ndarray = run.call("values", Values(batch(seed).batch)).values
    return found


def criticise(run: Connection, seed: int = 0) -> Stepped:
    of = batch(seed).batch
    size = of.completions.size
    targets = ValueTargets(np.ones(size, np.float32), np.zeros(size, np.float32))
    stats: LossStats = run.call("value_backward", ValueBackward(of, targets, ValueLoss(None), float(size)))
    assert stats.tokens == size
    stepped: Stepped = run.call("optim_step", OptimStep(1e-2, 1.0, "critic"))
    return stepped


def checkpoint(run: Connection, final: Path) -> Path:
    temporary = final.with_name(f".tmp-{final.name}")
    temporary.mkdir(parents=True)
    saved: Saved = run.call("save", Save(str(temporary)))
    assert f"{CRITIC}/value_head.safetensors" in saved.files
    commit(temporary, final)
    return final


def test_a_critic_learns_and_leaves_the_policy(running: Running, tmp_path: Path) -> None:
    with running.connect("alone") as alone, running.connect("both") as both:
        alone.call("open", OPEN)
        opened: Opened = both.call("open", WITH_CRITIC)
        assert values(both).tolist() == [0.0] * batch().batch.completions.size
        for seed in range(3):
            step = criticise(both, seed)
            assert step.applied and step.tokens > 0
            assert learn(both, seed).grad_norm == learn(alone, seed).grad_norm
        assert values(both).mean() > 0.05
        published = [publish(run, tmp_path, 0) for run in (alone, both)]
        assert published[0].sha256 == published[1].sha256
        assert len(set(texts(generate(both, "both@0")))) > 0
        status: PoolStatus = both.call("status", Nothing())
        assert [t.bytes for t in status.tenants] == [opened.parameters * 16, opened.bytes]
        assert "value:clip" in status.info.losses


def test_a_resumed_critic_continues_bit_for_bit(running: Running, tmp_path: Path) -> None:
    with running.connect("critic") as run:
        run.call("open", WITH_CRITIC)
        criticise(run, 0)
        saved = checkpoint(run, tmp_path / "saved")
        expected = [criticise(run, seed).grad_norm for seed in (1, 2)], values(run).tolist()
    critic = replace(WITH_CRITIC.critic or OpenCritic(4, 8.0), resume_from=str(saved / CRITIC))
    with running.connect("critic", attempt=2) as resumed:
        resumed.call("open", replace(WITH_CRITIC, resume_from=str(saved), critic=critic))
        assert ([criticise(resumed, seed).grad_norm for seed in (1, 2)], values(resumed).tolist()) == expected


def test_nothing_opens_beside_a_damaged_critic(running: Running, tmp_path: Path) -> None:
    with running.connect("damaged") as run:
        run.call("open", WITH_CRITIC)
        saved = checkpoint(run, tmp_path / "saved")
    lost = OpenCritic(4, 8.0, str(tmp_path / "nowhere"))
    with running.connect("damaged", attempt=2) as resumed:
        with pytest.raises(IntegrityError, match="nowhere"):
            resumed.call("open", replace(WITH_CRITIC, resume_from=str(saved), critic=lost))
        assert not slots_of(running, "damaged")
        with pytest.raises(Conflict, match="no open slot"):
            values(resumed)


def test_closed_and_evicted_runs_leave_no_critic(running: Running) -> None:
    with running.connect("gone") as run, running.connect() as daemon:
        run.call("open", WITH_CRITIC)
        assert slots_of(running, "gone") == ["gone", critic_slot("gone")]
        daemon.call("evict", Evict("gone", 1))
        assert not slots_of(running, "gone")
    with running.connect("gone", attempt=2) as again:
        again.call("open", WITH_CRITIC)
        again.call("close", Nothing())
        assert not slots_of(running, "gone")


def test_runs_without_a_critic_have_no_values(running: Running) -> None:
    with running.connect("plain") as run:
        run.call("open", OPEN)
        info: PoolInfo = run.call("hello", Nothing())
        assert info.pool == "p"
        for ask in (values, criticise):
            with pytest.raises(Conflict, match="without a critic"):
                ask(run)


def slots_of(running: Running, run: str) -> list[str]:
    return [slot for slot in running.pool.trainer.slots() if slot.partition("/")[0] == run]


def test_a_repeated_call_is_done_once(running: Running) -> None:
    of = batch().batch
    targets = ValueTargets(
        np.ones(of.completions.size, np.float32), np.zeros(of.completions.size, np.float32)
    )
    call = ValueBackward(of, targets, ValueLoss(), float(of.completions.size))
    norms = []
    for repeats in (1, 2):
        with running.connect(f"repeats-{repeats}") as run:
            run.call("open", WITH_CRITIC)
            for _ in range(repeats):
                run._seq = 6
                run.call("value_backward", call)
            norms.append(run.call("optim_step", OptimStep(1e-2, 1.0, "critic")).grad_norm)
            run.call("close", Nothing())
    assert norms[0] == norms[1] > 0
