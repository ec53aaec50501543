"""Versions that are loaded from their files: attested against the trainer, kept until they are let go."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lorad.engines.base import AdapterSource
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.errors import AttestationFailed, Conflict, NotFound
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.pool.loaded import SPARE, LoadedVersions
from lorad.protocol.batch import Sampling
from lorad.protocol.calls import Generate, LetGo, Loaded, LoadVersion, Nothing, Published
from lorad.protocol.connection import Connection
from tests.kit.fakes import faulty_engines
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.pool_kit import (
    OPEN,
    SHAPES,
    TINY,
    Running,
    generate,
    learn,
    prompts,
    publish,
    running_pool,
    texts,
    until,
)

FUSED: dict[str, str] = {}
APART = {"mode": "resident", "dtype": "bfloat16"}


@contextmanager
def pool(directory: Path, engine: str = "Clean", **changes: Any) -> Iterator[tuple[Running, Connection]]:
    """Run a pool with a faulty engine, and connect to it without a run."""
    kind = f"tests.kit.fakes.faulty_engines:{engine}"
    with running_pool(directory, engine_class=kind, **changes) as running, running.connect() as server:
        yield running, server


@pytest.fixture
def compute() -> Iterator[Compute]:
    made = Compute()
    yield made
    made.close()


def published(running: Running, directory: Path, count: int, lr: float = 1e-4) -> list[Published]:
    """Versions of a run that is gone again."""
    versions = []
    with running.connect("sorter") as run:
        run.call("open", OPEN)
        for number in range(count):
            learn(run, seed=number, lr=lr)
            versions.append(publish(run, directory, number))
        run.call("close", Nothing())
    return versions


def load(
    server: Connection, version: Published, root: Path, *, keep: bool = False, verb: str = "load_version"
) -> Loaded:
    run, _, number = version.version.partition("@")
    files = root / run / "versions" / f"{int(number):06d}"
    loaded: Loaded = server.call(verb, LoadVersion(version.version, str(files), version.sha256, keep=keep))
    return loaded


def held(running: Running) -> list[str]:
    """List the versions that the engine holds."""
    return list(running.pool.engine._versions.table)  # type: ignore[attr-defined]


@pytest.mark.parametrize("changes", [FUSED, APART])
def test_loaded_version_is_attested_against_its_files(changes: dict[str, str], tmp_path: Path) -> None:
    with pool(tmp_path, **changes) as (running, server):
        (version,) = published(running, tmp_path, 1)
        loaded = load(server, version, tmp_path).attestation
        assert loaded.verdict == "passed" and ("amplified" in loaded.facts) == (changes == APART)
        assert load(server, version, tmp_path).attestation == loaded
        assert not running.pool.trainer.slots() and held(running) == ["sorter@0+2"]


@pytest.mark.parametrize("changes", [FUSED, APART])
@pytest.mark.parametrize("fault", ["ServesBase", "DropsTarget", "RollsA", "ServesNaN"])
def test_faulty_load_is_found_and_removed(
    fault: str, changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty_engines.Faulty, "faulty_from", 2)
    with pool(tmp_path, fault, **changes) as (running, server):
        (version,) = published(running, tmp_path, 1)
        with pytest.raises(AttestationFailed, match="sorter@0 failed its attestation"):
            load(server, version, tmp_path)
        with pytest.raises(NotFound):
            generate(server, "sorter@0", verb="serve")
        assert held(running) == [] and not running.pool.trainer.slots()


@pytest.mark.parametrize("changes", [FUSED, APART])
def test_version_changed_since_its_load_is_found(changes: dict[str, str], tmp_path: Path) -> None:
    with pool(tmp_path, **changes) as (running, server):
        (version,) = published(running, tmp_path, 1)
        with pytest.raises(NotFound):
            load(server, version, tmp_path, verb="attest_again")
        load(server, version, tmp_path)
        assert load(server, version, tmp_path, verb="attest_again").attestation.verdict == "passed"
        engine: Any = running.pool.engine
        lora = engine._versions.table["sorter@0+2"].lora
        for _, b in lora.pairs.values():
            b.mul_(2)
        engine._models.forget(lora)  # what was merged of it
        assert load(server, version, tmp_path, verb="attest_again").attestation.verdict == "failed"
        assert held(running) == ["sorter@0+2"] and not running.pool.trainer.slots()


def test_version_is_served_only_after_attestation(tmp_path: Path) -> None:
    with pool(tmp_path, "WaitsForScores") as (running, server), running.connect() as other:
        (version,) = published(running, tmp_path, 1)
        gate = running.pool.engine.gate = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=load, args=(server, version, tmp_path))
        thread.start()
        until(lambda: "sorter@0+2" in held(running))
        with pytest.raises(NotFound):
            generate(other, "sorter@0", verb="serve")
        gate.set()
        thread.join()
        assert texts(generate(other, "sorter@0", verb="serve"))


@pytest.mark.system
def test_kept_versions_stay_whatever_else_is_loaded(tmp_path: Path) -> None:
    with pool(tmp_path) as (running, server):
        versions = published(running, tmp_path, SPARE + 2)
        for number, version in enumerate(versions):
            load(server, version, tmp_path, keep=number == 0)
        assert server.call("status", Nothing()).kept == ["sorter@0"]
        server.call("let_go", LetGo("sorter@0"))
        status = server.call("status", Nothing())
        assert status.kept == [] and "sorter@0" not in status.loaded
        until(lambda: "sorter@0+2" not in held(running))


def test_released_version_stays_while_its_run_lives(tmp_path: Path) -> None:
    with pool(tmp_path) as (running, server), running.connect("sorter") as run:
        run.call("open", OPEN)
        version = publish(run, tmp_path, 0)
        load(server, version, tmp_path, keep=True)
        server.call("let_go", LetGo("sorter@0"))
        assert texts(generate(run, "sorter@0"))
        run.call("close", Nothing())
        until(lambda: held(running) == [])


@pytest.mark.system
def test_requests_in_flight_end_before_a_version_goes(tmp_path: Path) -> None:
    with pool(tmp_path) as (running, server), running.connect() as other:
        (version,) = published(running, tmp_path, 1)
        load(server, version, tmp_path, keep=True)
        chunks = other.stream("serve", Generate("sorter@0", prompts(), Sampling(max_new_tokens=200)))
        next(chunks)
        server.call("let_go", LetGo("sorter@0"))
        *_, result = chunks
        assert result.samples == 16
        until(lambda: held(running) == [])


async def test_released_version_stays_while_in_use(compute: Compute) -> None:
    engine = BuiltinEngine(load_base(TINY, torch.float32, torch.device("cpu")), compute, TINY)
    loaded = LoadedVersions(engine, lambda _: None)
    adapter = random_adapter(SHAPES, seed=0)
    entry = await loaded.publish("sorter@0", AdapterSource(adapter.digest(), adapter))
    loaded.adopt(entry)
    with loaded.use("sorter@0"):
        loaded.release(entry)
        await asyncio.sleep(0)
        assert loaded.names() == [] and [held.name for held in await engine.loaded()] == ["sorter@0"]
    await loaded.settle()
    assert not await engine.loaded()


@pytest.mark.system
def test_unkept_versions_make_room_for_kept_ones(tmp_path: Path) -> None:
    with pool(tmp_path, "HoldsFour", **APART) as (running, server):
        first, *others = published(running, tmp_path, 4)
        load(server, first, tmp_path)
        for version in others:
            load(server, version, tmp_path, keep=True)
        assert server.call("status", Nothing()).loaded == ["sorter@1", "sorter@2", "sorter@3"]
        with pytest.raises(Conflict, match="sorter@0 needs 2"):
            load(server, first, tmp_path)


def test_run_keeps_the_versions_it_asked_for(tmp_path: Path) -> None:
    with pool(tmp_path) as (running, _), running.connect("sorter") as run:
        run.call("open", OPEN.__class__(OPEN.modules, OPEN.rank, OPEN.alpha, kept=3))
        for number in range(5):
            publish(run, tmp_path, number)
        assert run.call("status", Nothing()).loaded == ["sorter@2", "sorter@3", "sorter@4"]
