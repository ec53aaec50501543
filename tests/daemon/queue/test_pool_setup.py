"""The setup that the daemon gives a pool: which server a run needs, and which runs share one."""

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from lorad.backends.setup import CANARY_PROMPT, RANKS
from lorad.box.config import Backend, Config, DevicesConfig
from lorad.box.config import load as load_config
from lorad.daemon.api.verbs.logs import log_of
from lorad.daemon.api.views import run_view
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Device
from lorad.daemon.pool import Pool, load_pool, setup_for
from lorad.daemon.pools.life import find_or_make
from lorad.daemon.process.sharing import Users
from lorad.daemon.queue.place import starting
from lorad.errors import SpecError
from lorad.pool.attest.canaries import PROMPT_TOKENS
from lorad.preflight.__main__ import preflight
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.preflight import BaseFacts
from lorad.spec.model import convert
from lorad.states import RunState
from lorad.store import runs
from tests.kit.daemon_world import open_context, serving, until
from tests.kit.journals import a_run

LINEARS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
SECRET = "hunter2"
CONFIG = Config(backends={"sglang": Backend(python=Path("/venv/bin/python"), env={"TOKEN": SECRET})})
WITH_RANKS = Config(
    backends={**CONFIG.backends, "megatron": Backend(python=Path("/m/bin/python"), env={"TOKEN": SECRET})}
)


def setup(
    rollout: dict[str, Any] | None = None, *, config: Config = CONFIG, device: str = "cpu", **spec: Any
) -> PoolSetup:
    modules = spec.pop("modules", ["model.layers.0.self_attn.q_proj"])
    facts = BaseFacts(modules=modules, linears=LINEARS, max_positions=2048)
    whole = convert({"rollout": {"backend": "sglang", **(rollout or {})}, **spec})
    given = [Device(name, "", 1 << 30) for name in device.split()]
    base = {"model_path": "/m", "dtype": "float32"}
    return setup_for(whole, config, *given, **base, threads=1, facts=facts, cwd="/spec")


def test_server_comes_from_spec_config_and_base() -> None:
    made = setup({"servers": 2, "temperature": 0.7, "engine_args": {"a": 1}}, lora={"rank": 17})
    server = made.server
    assert server is not None and (made.engine, made.mode) == ("sglang", "resident")
    assert (server.python, server.env, server.servers, server.tp) == (
        "/venv/bin/python",
        {"TOKEN": SECRET},
        2,
        1,
    )
    assert (server.max_rank, server.targets, server.context_length) == (32, tuple(LINEARS), 1024)
    assert (server.scaled_logprobs, server.urls, server.engine_args) == (True, (), {"a": 1})


def test_waiting_for_a_server_names_its_log(tmp_path: Path) -> None:
    assert "starts sglang: `lorad logs a --of engine -f`" in starting(Pool(setup(), tmp_path), "a")
    assert starting(Pool(setup({"url": "http://h:1"}), tmp_path), "a") == ""
    states = (RunState.QUEUED, RunState.STARTING, RunState.RUNNING, RunState.ENDED)
    views = [run_view(cast(Context, None), a_run(waiting="something", state=state)) for state in states]
    assert [view.waiting for view in views] == ["something", "something", "", ""]


def test_waiting_for_ranks_names_their_logs(tmp_path: Path) -> None:
    fsdp = {"backend": "fsdp"}
    both, alone = setup(trainer=fsdp), setup({"backend": "builtin"}, trainer=fsdp)
    assert starting(Pool(both, tmp_path), "a").endswith(
        "starts fsdp and sglang: `lorad logs a --of trainer -f` and `lorad logs a --of engine -f` show how "
        "far it is"
    )
    assert "starts fsdp: `lorad logs a --of trainer -f` shows" in starting(Pool(alone, tmp_path), "a")


def test_servers_by_url_are_never_started() -> None:
    made = setup(
        {"url": ["http://h:1", "unix:/s"], "key_file": "k", "admin_key_file": "~/a"}, device="cuda:0"
    )
    assert made.server is not None and made.mode == "resident"
    assert (made.server.python, made.server.env, made.server.servers) == ("", {}, 2)
    assert made.server.urls == ("http://h:1", "unix:/s")
    assert (made.server.key_file, made.server.admin_key_file) == ("/spec/k", str(Path.home() / "a"))


@pytest.mark.parametrize(
    ("spec", "length"),
    [
        ({"data": {"max_prompt_tokens": 100}}, 128),
        ({"data": {"max_prompt_tokens": 112}}, 128),
        ({"data": {"max_prompt_tokens": 113}}, 256),
        ({"data": {"max_prompt_tokens": 2000}}, 2048),
        ({"data": {"max_prompt_tokens": 4}, "attest": {"tokens": 256}}, 512),
    ],
)
def test_context_fits_longest_sample_and_canary(spec: dict[str, Any], length: int) -> None:
    made = setup(**spec).server
    assert made is not None and made.context_length == length
    assert CANARY_PROMPT >= PROMPT_TOKENS


def test_no_context_is_longer_than_the_base() -> None:
    facts = BaseFacts(modules=["q_proj"], linears=LINEARS, max_positions=1000)
    whole, device = convert({"rollout": {"backend": "sglang"}}), Device("cpu", "", 1)
    server = setup_for(whole, CONFIG, device, model_path="/m", dtype="float32", threads=1, facts=facts).server
    assert server is not None and server.context_length == 1000


def test_modes_follow_from_backend_and_device() -> None:
    assert setup({"backend": "builtin"}, device="cuda:0").mode == "fused"
    assert setup({"backend": "builtin"}, device="cuda:0", trainer={"backend": "fsdp"}).mode == "resident"
    assert (
        setup(device="cuda:0").mode
        == setup(device="cuda:0", trainer={"backend": "fsdp"}).mode
        == "timesliced"
    )
    assert setup({"backend": "transformers"}, device="cuda:0").mode == "resident"
    assert setup({"backend": "transformers"}, trainer={"backend": "fsdp"}).mode == "fused"
    assert setup({"backend": "transformers"}, trainer={"backend": "fsdp", "dp": 2}).mode == "resident"
    assert setup(trainer={"backend": "fsdp"}).mode == "resident"
    assert setup(device="cuda:0", pool={"mode": "resident"}).mode == "resident"


def test_ranks_come_from_spec_and_config() -> None:
    wanted = {"backend": "megatron", "tp": 2, "pp": 3, "cp": 2, "dp": 2, "ep": 4, "backend_args": {"a": 1}}
    ranks = setup(trainer=wanted, config=WITH_RANKS).ranks
    assert ranks is not None and (ranks.python, ranks.env) == ("/m/bin/python", {"TOKEN": SECRET})
    assert (ranks.tp, ranks.pp, ranks.cp, ranks.dp, ranks.ep, ranks.ranks) == (2, 3, 2, 2, 4, 24)
    assert ranks.args == {"a": 1} and setup().ranks is None
    assert (fsdp := setup(trainer={"backend": "fsdp"}).ranks) is not None and fsdp.python == ""


def test_runs_that_need_other_ranks_have_other_pools() -> None:
    fsdp = {"backend": "fsdp", "dp": 2}
    same = setup(trainer=fsdp | {"lr": 1.0})
    others = [setup(trainer=fsdp | {"dp": 4}), setup(trainer=fsdp | {"backend_args": {"a": 1}}), setup()]
    assert same.key == setup(trainer=fsdp).key and same.key not in [other.key for other in others]
    assert SECRET not in setup(trainer={"backend": "megatron"}, config=WITH_RANKS).key


def test_a_pool_has_all_of_its_devices() -> None:
    made = setup(device="cuda:2 cuda:3", trainer={"backend": "fsdp", "dp": 2})
    assert (made.device, made.devices, made.names) == ("cuda:2", ("cuda:2", "cuda:3"), ("cuda:2", "cuda:3"))
    alone = setup(device="cuda:2")
    assert (alone.devices, alone.names) == ((), ("cuda:2",)) and alone.key != made.key


def test_trainer_and_servers_have_devices_apart() -> None:
    resources = {"rollout_devices": 2}
    pool = setup({"servers": 2}, device="cuda:1 cuda:2 cuda:3", resources=resources)
    assert (pool.mode, pool.device) == ("split", "cuda:1")
    assert (pool.trainer_names, pool.server_names) == (("cuda:1",), ("cuda:2", "cuda:3"))
    shared = setup({"servers": 2}, device="cuda:1 cuda:2 cuda:3")
    assert shared.trainer_names == shared.server_names == ("cuda:1", "cuda:2", "cuda:3")
    assert not pool.takes(replace(pool, rollout_devices=1))


def test_slots_of_a_cpu_add_their_memory() -> None:
    config = replace(CONFIG, devices=DevicesConfig(cpu_slots=4))
    pool = setup({"servers": 2}, config=config, device="cpu:0 cpu:1 cpu:2", pool={"mode": "split"})
    assert (pool.device, pool.server_names) == ("cpu", ("cpu:1", "cpu:2"))
    assert pool.memory_fraction == pytest.approx(0.85 * 3 / 4)


def test_runs_that_fit_one_server_share_pools() -> None:
    first = setup(lora={"rank": 4}, modules=["model.layers.0.self_attn.q_proj"])
    other = setup(
        lora={"rank": 16, "dropout": 0.1}, modules=["model.layers.1.mlp.up_proj"], trainer={"lr": 1.0}
    )
    assert first.key == other.key
    assert setup(modules=["a.embed_tokens", "a.q_proj"]).server.targets == ("embed_tokens", "q_proj")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changed",
    [
        setup({"servers": 2}),
        setup({"temperature": 0.5}),
        setup({"engine_args": {"a": 1}}),
        setup({"url": "http://h:1"}),
        setup(lora={"rank": 17}),
        setup(model={"quantize": "nf4"}),
        setup(data={"max_prompt_tokens": 1024}),
        setup(
            config=Config(backends={"sglang": Backend(python=Path("/venv/bin/python"), env={"TOKEN": "x"})})
        ),
        setup(
            config=Config(
                backends={"sglang": Backend(python=Path("/venv2/bin/python"), env={"TOKEN": SECRET})}
            )
        ),
    ],
)
def test_runs_that_need_other_servers_have_other_pools(changed: PoolSetup) -> None:
    assert changed.key != setup().key


def test_pool_json_keeps_secrets_for_owner_alone(
    home: Path,
) -> None:
    pool = find_or_make(open_context(home), setup())
    path = pool.root / "pool.json"
    assert SECRET in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET not in pool.setup.key
    assert (loaded := load_pool(pool.root)) is not None and loaded.setup == pool.setup


def test_a_pool_from_before_servers_still_loads(home: Path) -> None:
    pool = find_or_make(open_context(home), setup({"backend": "builtin"}))
    path = pool.root / "pool.json"
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "server"})
    )
    assert (loaded := load_pool(pool.root)) is not None and loaded.setup.key == pool.setup.key


def test_ranks_are_rounded_up_to_what_servers_take() -> None:
    asked = [1, 16, 17, 33, 129, 257, 321, 512]
    found = [server.max_rank for rank in asked if (server := setup(lora={"rank": rank}).server)]
    assert found == [16, 16, 32, 64, 256, 320, 512, 512] and set(found) <= set(RANKS)


async def test_daemon_uses_checked_backends_and_keeps_secrets(home: Path) -> None:
    async with serving(home) as api:
        backend = {"python": "/venv/bin/python", "env": {"TOKEN": SECRET}}
        (home / "config.yaml").write_text(json.dumps({"backends": {"sglang": backend}}))
        await api.run("a", "rollout.backend=sglang")
        await api.until("a", "ended")
        (pool,) = api.ctx.pools.values()
        assert pool.setup.server is not None and pool.setup.server.env == backend["env"]
        assert holders_of(SECRET, home) == {"config.yaml", "pool.json"}


def holders_of(text: str, directory: Path) -> set[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.name for path in files if text.encode() in path.read_bytes()}


async def test_run_whose_backend_left_config_waits(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a", "rollout.backend=sglang")
        row = await until(lambda: (row := runs.get(api.ctx.store, "a")).waiting and row)
        assert (row.state, row.waiting) == (
            "queued",
            "rollout.backend: config.yaml names no python for sglang",
        )


def test_facts_of_the_preflight_are_enough(tmp_path: Path) -> None:
    facts = preflight(convert({}), cwd=tmp_path)
    whole, device = convert({"rollout": {"backend": "sglang"}}), Device("cpu", "", 1)
    server = setup_for(whole, CONFIG, device, model_path="/m", dtype="float32", threads=1, facts=facts).server
    assert server is not None and server.targets == tuple(LINEARS)


@pytest.mark.parametrize(
    ("rollout", "of", "file"),
    [
        ({}, "engine", "engine-0.log"),
        ({}, "engine-1", "engine-1.log"),
        ({}, "trainer", "log"),
        ({"backend": "builtin"}, "engine", "log"),
        ({"url": "http://h:1"}, "engine", "log"),
    ],
)
def test_the_log_of_an_engine_is_its_servers(rollout: dict[str, Any], of: str, file: str, home: Path) -> None:
    pool = Pool(setup(rollout), home / "p")
    for number in (1, 2):
        pool.attempt(number).root.mkdir(parents=True)
        (pool.attempt(number).root / "command.json").touch()
    ctx = cast(Context, SimpleNamespace(pools={"p": pool}, users=Users()))
    assert log_of(ctx, a_run(pool="p"), of) == home / "p" / "attempts" / "0002" / file
    with pytest.raises(SpecError, match="no log of 'engine-x'"):
        log_of(ctx, a_run(pool="p"), "engine-x")


def test_the_log_of_a_trainer_is_its_ranks(home: Path) -> None:
    pool = Pool(setup(trainer={"backend": "fsdp"}), home / "p")
    pool.attempt(1).root.mkdir(parents=True)
    (pool.attempt(1).root / "command.json").touch()
    ctx = cast(Context, SimpleNamespace(pools={"p": pool}, users=Users()))
    assert log_of(ctx, a_run(pool="p"), "trainer") == pool.attempt(1).root / "trainer.log"


def test_unreadable_config_is_never_quoted(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in (
        f"backends: {{sglang: {{env: {{A: '{SECRET}",
        f"backends: {{sglang: {{env: {{A: [{SECRET}]}}}}}}",
    ):
        path.write_text(text)
        with pytest.raises(SpecError) as refused:
            load_config(path)
        assert SECRET not in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("python", ["venv/bin/python", "3"])
def test_backend_python_is_an_absolute_path(python: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"backends: {{sglang: {{python: {python}}}}}")
    with pytest.raises(SpecError, match="python"):
        load_config(path)
    path.write_text("backends: {sglang: {python: ~/venv/bin/python, env: {A: b}}}")
    assert load_config(path).backends["sglang"] == Backend(
        python=Path.home() / "venv/bin/python", env={"A": "b"}
    )


def test_a_pool_with_a_teacher_takes_plain_runs() -> None:
    plain = setup({"backend": "builtin"})
    taught, other = (replace(plain, teacher=name, teacher_path=f"/{name}") for name in ("big", "huge"))
    assert taught.takes(plain) and taught.takes(taught)
    assert not plain.takes(taught) and not other.takes(taught) and plain.key != taught.key
    assert plain.taught_by(taught).key == taught.key
    assert all(pool.serves(run) for pool in (plain, taught, other) for run in (plain, taught, other))
