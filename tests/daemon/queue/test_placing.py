"""Where runs go on a machine with several GPUs: neighbours, each held by one pool."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorad.box.config import Backend, Config, RuntimeSettings
from lorad.box.machine import read_machine
from lorad.daemon.api.verbs.box import list_devices
from lorad.daemon.gpu.devices import Device, is_taken
from lorad.daemon.queue.place import place_runs
from lorad.daemon.queue.setups import candidates
from lorad.protocol.pool_setup import PoolSetup
from lorad.store import pools as rows
from lorad.store import runs
from tests.kit.daemon_world import idle_pools, open_context, reconciling, submit, until, until_state
from tests.kit.fakes.gpu_kit import NO_QUERY, gpus

FSDP: dict[str, Any] = {"backend": "fsdp", "steps": 6}


async def test_run_gets_a_gpu_for_each_rank(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reconciling(home) as ctx:
        gpus(ctx, 3, monkeypatch, tmp_path)
        submit(ctx, "a", trainer=FSDP | {"dp": 2})
        assert (await until_state(ctx, "a", "ended")).reason == "completed"
        (pool,) = ctx.pools.values()
        assert pool.setup.names == ("cuda:0", "cuda:1")
        assert [row.device for row in rows.leases(ctx.store)] == ["cuda:0", "cuda:1"]
        assert [is_taken(device) for device in ctx.gpus.devices] == [True, True, False]
        assert [found.pool for found in await list_devices(ctx, NO_QUERY)] == [pool.id, pool.id, None]


async def test_warm_pool_then_free_gpu_is_preferred(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reconciling(home) as ctx:
        gpus(ctx, 2, monkeypatch, tmp_path)
        for name, model in (("a", "/models/one"), ("b", "/models/two"), ("c", "/models/two")):
            submit(ctx, name, model=model)
            await until_state(ctx, name, "ended")
        where = {pool.id: (pool.setup.device, pool.process.is_up, pool.number) for pool in ctx.pools.values()}
        assert where == {"one-1": ("cuda:0", True, 1), "two-1": ("cuda:1", True, 1)}


async def test_idle_pools_clear_every_needed_gpu(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reconciling(home) as ctx:
        gpus(ctx, 2, monkeypatch, tmp_path)
        await idle_pools(ctx, "one", "two")
        submit(ctx, "wide", trainer=FSDP | {"dp": 2})
        assert (await until_state(ctx, "wide", "ended")).reason == "completed"
        assert [pool.id for pool in ctx.pools.values() if pool.process.is_up] == [
            runs.get(ctx.store, "wide").pool
        ]


async def test_more_gpus_than_there_are_is_told(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reconciling(home) as ctx:
        gpus(ctx, 2, monkeypatch, tmp_path)
        submit(ctx, "a", trainer=FSDP | {"dp": 4})
        waiting = await until(lambda: runs.get(ctx.store, "a").waiting)
        assert waiting == "it needs 4 GPUs, this machine has 2"


def test_on_the_cpu_ranks_share_the_one_device(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a", trainer=FSDP | {"dp": 4})
    place_runs(ctx)
    (pool,) = ctx.pools.values()
    assert pool.setup.names == ("cpu",) and [run.name for run in runs.active_in(ctx.store, pool.id)] == ["a"]


def test_cached_setup_follows_request_config_and_devices(home: Path) -> None:
    ctx = open_context(home)
    machine = read_machine()
    ctx.gpus.machine = lambda: machine
    submit(ctx, "a", "/models/tiny", deterministic=False)
    (first,) = candidates(ctx, runs.get(ctx.store, "a"))

    def asked() -> PoolSetup:
        (place,) = candidates(ctx, runs.get(ctx.store, "a"))
        assert place.devices == first.devices
        return place.setup

    assert asked().model_path == "/models/tiny"
    path = ctx.home.run("a").root / "request.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_path": "/models/other"}))
    assert asked().model_path == "/models/other"
    ctx.config = Config(
        backends={"builtin": Backend(trainer="mine:Trainer")}, runtime=RuntimeSettings(threads=3)
    )
    assert (asked().trainer_class, asked().threads) == ("mine:Trainer", 3)
    with ctx.store.write() as connection:
        connection.execute("UPDATE runs SET owner_uid = 7, spec = json_set(spec, '$.pool.threads', 2)")
    assert (asked().owner, asked().threads) == (7, 2)
    ctx.gpus.devices = [Device("cpu:0", "half a CPU", 1 << 30), Device("cpu:1", "half a CPU", 1 << 30)]
    assert first.devices not in [place.devices for place in candidates(ctx, runs.get(ctx.store, "a"))]
