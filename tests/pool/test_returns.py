"""Engines that were away, engines of several servers, engines that die: what the pool serves from them."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.cli.commands.pools import engine_row
from lorad.daemon.api.views import engine_view
from lorad.errors import AttestationFailed, LoradError, PoolLost
from lorad.models.facts import ModelFacts, read_facts
from lorad.pool import capacity
from lorad.protocol.calls import LoadVersion, Nothing
from lorad.protocol.connection import Connection
from lorad.protocol.pool_setup import RanksSetup, ServerSetup
from lorad.protocol.status import PoolInfo, PoolStatus
from lorad.records.pools import Pool
from tests.kit.fakes.sleeping_engines import Served
from tests.kit.pool_kit import (
    OPEN,
    SHAPES,
    TINY,
    config_of,
    generate,
    learn,
    publish,
    running_pool,
    texts,
    until,
)

SETUP = ServerSetup(max_rank=16, targets=("q_proj",), context_length=256)


@contextmanager
def opened(directory: Path, engine: str, run: str = "sorter", **changes: Any) -> Iterator[Connection]:
    """A run with an open slot, in a pool of its own."""
    directory.mkdir(exist_ok=True)
    kind = f"tests.kit.fakes.sleeping_engines:{engine}"
    with running_pool(directory, engine_class=kind, **changes) as running, running.connect(run) as connection:
        connection.call("open", OPEN)
        yield connection


def two_versions(connection: Connection, directory: Path, lr: float = 1e-3) -> None:
    """sorter@1 and sorter@2, neither of which is the base; then the engine is asleep, where it can sleep."""
    for number in (1, 2):
        learn(connection, number, lr)
        publish(connection, directory, number)
    learn(connection, 3, lr)


@pytest.mark.system(
    but=["WakesWithBase-1e-05-sorter@2 as .* like the base", "WakesWithAnotherBase-0.001-base as"]
)
@pytest.mark.parametrize(
    ("engine", "lr", "told"),
    [
        ("WakesWithBase", 1e-3, "sorter@2 as .* like the base"),
        ("WakesWithBase", 1e-5, "sorter@2 as .* like the base"),
        ("WakesWithPrevious", 1e-3, "sorter@2 as .* like the previous version"),
        ("WakesWithPrevious", 1e-5, "sorter@2 as .* like the previous version"),
        ("WakesWithNaN", 1e-3, "sorter@2 as .* not finite"),
        ("WakesWithAnotherBase", 1e-3, "base as"),
    ],
)
def test_engine_waking_with_other_weights_serves_nobody(
    engine: str, lr: float, told: str, tmp_path: Path
) -> None:
    with opened(tmp_path, engine, mode="timesliced") as connection:
        two_versions(connection, tmp_path, lr)
        for version in ("sorter@2", "sorter@1", "base"):
            with pytest.raises(AttestationFailed, match=f"after its return the engine does not serve {told}"):
                generate(connection, version)


@pytest.mark.system(but="bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_wakes_as_it_was_serves(dtype: str, tmp_path: Path) -> None:
    with opened(tmp_path, "Sleeps", mode="timesliced", dtype=dtype) as connection:
        before = texts(generate(connection, "base"))
        for number in range(4):
            learn(connection, number)
            publish(connection, tmp_path, number)
        learn(connection)
        assert texts(generate(connection, "base")) == before and texts(generate(connection, "sorter@3"))


def served(connection: Connection, directory: Path) -> None:
    """sorter@1 and sorter@2 are not their run's any more, but served."""
    versions = []
    for number in (1, 2):
        learn(connection, number)
        versions.append(publish(connection, directory, number))
    connection.call("close", Nothing())
    for number, version in enumerate(versions, 1):
        files = directory / "sorter" / "versions" / f"{number:06d}"
        connection.call("load_version", LoadVersion(version.version, str(files), version.sha256))


@pytest.mark.system
def test_served_versions_are_checked_after_a_wake(tmp_path: Path) -> None:
    kind = "tests.kit.fakes.sleeping_engines:WakesWithBase"
    with (
        running_pool(tmp_path, engine_class=kind, mode="timesliced") as running,
        running.connect("sorter") as connection,
    ):
        connection.call("open", OPEN)
        served(connection, tmp_path)
        with running.connect("other") as other:
            other.call("open", OPEN)
            learn(other)
        with pytest.raises(AttestationFailed, match=r"sorter@2\+2 as .* like the base"):
            generate(connection, "sorter@2", verb="serve")


def test_version_must_be_right_on_every_server(tmp_path: Path) -> None:
    with opened(tmp_path, "SecondServerLags", mode="resident") as connection:
        publish(connection, tmp_path, 0)
        learn(connection)
        with pytest.raises(AttestationFailed, match=r"sorter@1 failed .* like the base .*\(1 of 2 servers\)"):
            publish(connection, tmp_path, 1)
        assert texts(generate(connection, "sorter@0"))


def test_every_server_must_have_the_trainers_base(tmp_path: Path) -> None:
    expected = pytest.raises(AttestationFailed, match="disagree about the base")
    with expected, opened(tmp_path, "SecondServerHasAnotherBase", mode="resident"):
        pass


@pytest.mark.system
def test_servers_must_agree_about_a_loaded_version(tmp_path: Path) -> None:
    with opened(tmp_path / "first", "Sleeps", mode="resident") as connection:
        learn(connection)
        version = publish(connection, tmp_path, 1)
    loads = LoadVersion("sorter@1", str(tmp_path / "sorter" / "versions" / "000001"), version.sha256)
    with opened(tmp_path / "second", "SecondServerLags", mode="resident") as connection:
        with pytest.raises(
            AttestationFailed, match=r"sorter@1 failed its attestation: .* \(1 of 2 servers\)"
        ):
            connection.call("load_version", loads)
        assert connection.call("status", Nothing()).loaded == []


def test_dead_engine_says_why_to_all_callers(tmp_path: Path) -> None:
    with opened(tmp_path, "Dies", mode="resident") as connection:
        publish(connection, tmp_path, 0)
        publish(connection, tmp_path, 1)
        for ask in (lambda: publish(connection, tmp_path, 2), lambda: generate(connection, "sorter@1")):
            with pytest.raises(PoolLost, match="out of memory") as lost:
                ask()
            assert lost.value.hint == "Resume the run."
        status: PoolStatus = connection.call("status", Nothing())
        assert (
            status.engine is not None and not status.engine.alive and "out of memory" in status.engine.detail
        )
        assert status.loaded == ["sorter@0", "sorter@1"]


def test_pools_tell_how_their_engine_is(tmp_path: Path) -> None:
    with opened(tmp_path, "Sleeps", mode="timesliced") as connection:
        publish(connection, tmp_path, 0)
        learn(connection)
        status: PoolStatus = connection.call("status", Nothing())
    view = engine_view("builtin", status)
    assert (view.alive, view.asleep, view.slots_used, view.slots) == (True, True, 1, 64)
    row = engine_row(
        Pool("p", mode="timesliced", engine_tokens_per_second=7.2),
        msgspec.structs.replace(view, waiting=3),
    )
    assert row == ("p", "builtin", "timesliced", "asleep", "0+3", "1/64", "", "7")
    assert msgspec.to_builtins(engine_view("builtin", None)) == {"name": "builtin"}


def test_status_without_an_engine_is_still_read() -> None:
    info = PoolInfo("p", 1, "m", "/m", "", "builtin", "builtin", "fused", "cpu", "float32", 1, 64, {})
    told = msgspec.to_builtins(PoolStatus(info, [], [], 0.0, 0.0, 1, 1.0))
    del told["engine"]
    assert msgspec.convert(told, PoolStatus).engine is None


SERVER = {"engine": "sglang", "engine_class": "tests.kit.fakes.sleeping_engines:Served", "server": SETUP}


def test_servers_get_settings_and_log_of_the_pool(tmp_path: Path) -> None:
    for life in ("0001", "0002"):
        (tmp_path / "attempts" / life).mkdir(parents=True)
    with running_pool(tmp_path, **SERVER, mode="timesliced") as running:
        engine = running.pool.engine
        assert (
            isinstance(engine, Served) and engine.told["shapes"] == SHAPES and engine.told["setup"] == SETUP
        )
        told = engine.told["settings"]
        assert (told.model, told.dtype, told.device, told.threads, told.sleep) == (
            TINY,
            "float32",
            "cpu",
            1,
            True,
        )
        assert (engine.told["work"], engine.told["logs"]) == (tmp_path, tmp_path / "attempts" / "0002")
        assert running.pool.info.versions["sglang"] == "0.5.23"
    assert Served.left == 0


def test_a_pool_beside_its_servers_trains_and_samples(tmp_path: Path) -> None:
    with (
        running_pool(tmp_path, **SERVER, mode="resident") as running,
        running.connect("sorter") as connection,
    ):
        connection.call("open", OPEN)
        learn(connection)
        published = publish(connection, tmp_path, 0)
        assert published.attestation.verdict == "passed" and texts(generate(connection, "sorter@0"))


def test_servers_end_when_the_base_cannot_load(tmp_path: Path) -> None:
    model = shutil.copytree(TINY, tmp_path / "model")
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    opens = Served.opens
    with pytest.raises(LoradError), running_pool(tmp_path, **SERVER, mode="resident", model_path=str(model)):
        pass
    assert (Served.opens, Served.left) == (opens + 1, 0)


def test_servers_are_not_one_process_with_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(LoradError, match="a server of its own"), running_pool(tmp_path, **SERVER):
        pass


@pytest.mark.parametrize(
    ("mode", "ranks", "left"),
    [
        ("resident", None, 0.4),
        ("timesliced", None, 0.8 - 1.2 * 0.25),
        ("timesliced", RanksSetup(tp=2), 0.8 - 0.2 * 0.125),
        ("timesliced", RanksSetup(dp=2), 0.8 - 0.2 * 0.25),
    ],
)
def test_servers_leave_the_trainer_its_memory(
    mode: str, ranks: RanksSetup | None, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "_total", lambda _: 1000)
    trainer = "megatron" if ranks else "builtin"
    config = config_of(Path(), device="cuda:0", mode=mode, memory_fraction=0.8, trainer=trainer, ranks=ranks)
    assert capacity.server_share(config, of_bytes(250)) == pytest.approx(left)


def test_base_must_fit_twice_when_timesliced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_total", lambda _: 1000)
    config = config_of(Path(), device="cuda:0", mode="timesliced", memory_fraction=0.8)
    with pytest.raises(LoradError, match="builtin:tiny twice"):
        capacity.server_share(config, of_bytes(600))


def of_bytes(count: int) -> ModelFacts:
    return replace(read_facts(TINY), dtype="bfloat16", parameters=count // 2)


APART: dict[str, Any] = {
    "mode": "split",
    "devices": ("cpu:0", "cpu:1", "cpu:2"),
    "rollout_devices": 2,
    "server": ServerSetup(
        python=sys.executable, servers=2, max_rank=16, targets=("q_proj",), context_length=64
    ),
    "engine_class": "tests.kit.fakes.stub_engine:StubEngine",
}


def test_a_lost_server_costs_itself_alone(tmp_path: Path) -> None:
    """It is started again, and the other one is as it was."""
    with running_pool(tmp_path, **APART) as running:
        fleet = running.pool.engine._fleet  # type: ignore[attr-defined]
        lost = fleet.servers[1]
        own, other = lost.process.pid, fleet.servers[0].process.pid
        os.kill(own, signal.SIGKILL)
        until(lambda: lost.state == "up" and lost.process.pid != own)
        assert running.pool.info.mode == "split"
        assert fleet.servers[0].process.pid == other and len(fleet.serving) == 2
