"""A pool whose trainer is made of processes of its own: how it is started, when its base is there, how it
ends.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lorad.errors import LoradError, PoolLost, SpecError
from lorad.models.base import Base
from lorad.models.facts import read_facts, weights_sha256
from lorad.models.loading import load_base
from lorad.pool import host
from lorad.pool.host import opened, watch_both
from lorad.protocol.calls import Nothing
from lorad.protocol.connection import Connection
from lorad.protocol.pool_setup import RanksSetup, ServerSetup
from lorad.protocol.status import PoolInfo
from tests.kit.fakes.lodging_trainers import Lodges
from tests.kit.fakes.sleeping_engines import Served, Sleeps
from tests.kit.pool_kit import OPEN, TINY, Running, config_of, generate, learn, publish, running_pool, texts

SERVER = ServerSetup(max_rank=16, targets=("q_proj",), context_length=256)
RANKS = RanksSetup(dp=2, args={"a": 1})


def apart(trainer: str = "Lodges", **changes: Any) -> dict[str, Any]:
    """A trainer and a server, neither in the pool's process."""
    classes = {
        "trainer_class": f"tests.kit.fakes.lodging_trainers:{trainer}",
        "engine_class": "tests.kit.fakes.sleeping_engines:Served",
    }
    return {"trainer": "fsdp", "ranks": RANKS, "server": SERVER, "mode": "timesliced", **classes, **changes}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Running]:
    with running_pool(tmp_path, **apart(threads=4)) as running:
        yield running
    assert (Lodges.left, Served.left) == (0, 0)


@pytest.fixture
def run(pool: Running) -> Iterator[Connection]:
    with pool.connect("sorter") as connection:
        connection.call("open", OPEN)
        yield connection


def test_trainer_and_server_take_turns_on_the_device(run: Connection, tmp_path: Path) -> None:
    for number in range(3):
        assert publish(run, tmp_path, number).attestation.verdict == "passed"
        assert Lodges.newest.moves[-1:] == ["offload"] and Sleeps.newest.changes[-1:] != ["sleep"]
        assert texts(generate(run, f"sorter@{number}"))
        learn(run, seed=number)
        assert Lodges.newest.moves[-1:] == ["onload"] and Sleeps.newest.changes[-1:] == ["sleep"]
    changes = len(Sleeps.newest.changes)
    assert Lodges.newest.moves == ["offload", "onload"] * ((changes + 1) // 2)


@pytest.mark.system
def test_a_step_costs_one_sleep_and_one_wake(run: Connection, tmp_path: Path) -> None:
    publish(run, tmp_path, 0)
    before = len(Sleeps.newest.changes)
    for number in (1, 2, 3):
        learn(run, seed=number)
        publish(run, tmp_path, number)
    assert Sleeps.newest.changes[before:] == ["sleep", "wake"] * 3


def test_step_reports_what_it_took(run: Connection) -> None:
    stepped = learn(run)
    assert stepped.tokens == 8 * (5 + 10) and stepped.seconds > 0
    assert (stepped.memory, stepped.memory_peak, stepped.mfu) == (100, 200, None)
    trainer = run.call("status", Nothing()).trainer
    assert (trainer.alive, trainer.here, trainer.memory) == (True, True, 100)


def test_ranks_get_setup_and_settings_of_the_pool(pool: Running) -> None:
    setup, settings = Lodges.newest.told
    assert (setup, settings.devices, settings.threads, settings.backend) == (RANKS, ("cpu",), 2, "fsdp")
    assert (settings.model, settings.name, settings.dtype) == (TINY, "builtin:tiny", "float32")
    with pool.connect() as connection:
        info: PoolInfo = connection.call("hello", Nothing())
    assert info.versions["trainer.torch"] == "0.0.1" != info.versions["torch"]
    assert info.model_sha256 == weights_sha256(TINY) and info.parameters == 607296


def test_builtin_engine_serves_beside_another_trainer(tmp_path: Path) -> None:
    beside = apart(mode="resident", server=None, engine_class=None)
    with running_pool(tmp_path, **beside) as pool, pool.connect("sorter") as run:
        run.call("open", OPEN)
        learn(run)
        assert publish(run, tmp_path, 0).attestation.verdict == "passed"
        assert texts(generate(run, "sorter@0")) and Lodges.newest.moves == []
    assert Lodges.left == 0


@pytest.mark.parametrize(
    ("device", "deterministic", "held"),
    [("cuda:0", True, True), ("cuda:0", False, False), ("cpu", True, False)],
)
def test_deterministic_pool_holds_a_gpu_to_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, *, deterministic: bool, held: bool
) -> None:
    """Before its base is loaded, which is left out here."""
    loads: list[tuple[bool, str | None]] = []

    def load(*_: object) -> Base:
        loads.append(
            (torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        )
        return load_base(TINY, torch.float32, torch.device("cpu"))

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host, "load_base", load)
    config = config_of(tmp_path, device=device, deterministic=deterministic)
    try:
        host._load(config, read_facts(TINY))
    finally:
        torch.use_deterministic_algorithms(False)
    assert loads == [(held, ":4096:8" if held else None)]


def test_pool_with_outside_parts_loads_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(host, "load_base")
    with running_pool(tmp_path, **apart(mode="resident")):
        pass


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer": "NeverStarts"}, "no flavour"),
        ({"trainer": "DiesAsItBegins"}, "rank 1 was killed"),
        ({"engine_class": "tests.pool.test_trainers:NeverOpens"}, "the server does not start"),
        ({"engine_class": "tests.pool.test_trainers:FailsLate"}, "the server does not start"),
    ],
)
def test_failed_start_of_one_side_ends_both(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(LoradError, match=says), running_pool(tmp_path, **apart(**changes)):
        pass
    assert (Lodges.left, Served.left) == (0, 0)


class NeverOpens(Served):
    @classmethod
    async def open(cls, *_: Any, **__: Any) -> Served:
        raise PoolLost("the server does not start")


class FailsLate(Served):
    """A server that fails when the trainer has started already."""

    @classmethod
    async def open(cls, *_: Any, **__: Any) -> Served:
        before = getattr(Lodges, "newest", None)
        while Lodges.newest is before or not Lodges.newest.moves:  # noqa: ASYNC110 (its moves are polled)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        raise PoolLost("the server does not start")


def test_ranks_are_not_one_process_with_the_engine(tmp_path: Path) -> None:
    fused = apart(mode="fused", server=None, engine_class=None)
    with (
        pytest.raises(SpecError, match="but fsdp has processes of its own"),
        running_pool(tmp_path, **fused),
    ):
        pass
    assert Lodges.left == 0


async def test_a_pool_ends_with_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LOOK_SECONDS", 0)
    async with opened(config_of(tmp_path, **apart(mode="resident")), tmp_path) as pool:
        Lodges.newest.death = "rank 1 was killed by SIGKILL"
        lost = await watch_both(pool)
        assert pool.stopping.is_set()
    assert "the trainer works for nobody any more: rank 1 was killed" in str(lost)
