"""Rollout backends that are servers: everything about them is looked at before anything starts."""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

from lorad.adapters.adapter import AdapterConfig
from lorad.backends import recipes
from lorad.backends.installed import installed_version, is_older
from lorad.backends.recipes import install_lines
from lorad.backends.registry import dialect_class
from lorad.box.paths import checkout
from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.preflight.__main__ import preflight
from lorad.preflight.pool_memory import Numbers, Step, pool_memory
from lorad.protocol.pool_setup import SERVER_SLOTS
from lorad.servers.table import SERVERS, Server
from lorad.spec.model import convert
from tests.kit.world import REPOSITORY
from tests.models.test_families import make_model

BACKENDS = sorted(SERVERS)
STEP = Step(prompts=2, samples=8, prompt=10, tokens=80)


@pytest.fixture
def install(tmp_path: Path, home: Path) -> Any:
    """`install(backend, version)`: an interpreter, named in config.yaml,
    that finds metadata of the server.
    """

    def install(backend: str, version: str = "", *, distribution: str = "") -> Path:
        site, python = tmp_path / f"{backend}-site", tmp_path / f"{backend}-python"
        name = distribution or backend
        about = site / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version or SERVERS[backend].tried}\n"
        )
        started = (
            f"import sys; sys.path.insert(0, {str(site)!r}); code = sys.argv[3]; sys.argv[1:4] = []; "
            "exec(code)"
        )
        code = f'exec {sys.executable} -I -c "{started}" "$@"'
        python.write_text(f"#!/bin/sh\n{code}\n")
        python.chmod(0o755)
        (home / "config.yaml").write_text(json.dumps({"backends": {backend: {"python": str(python)}}}))
        return python

    return install


def check(cwd: Path, rollout: dict[str, Any], **others: Any) -> Any:
    return preflight(convert({"rollout": rollout, **others}), cwd=cwd)


def refusal(cwd: Path, rollout: dict[str, Any], **others: Any) -> SpecError:
    with pytest.raises(SpecError) as refused:
        check(cwd, rollout, **others)
    assert refused.value.hint
    return refused.value


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ({"servers": 2}, "rollout.servers: the builtin engine is no server"),
        ({"tp": 2}, "rollout.tp: the builtin"),
        ({"url": "http://localhost:1"}, "rollout.url: the builtin"),
        ({"key_file": "k"}, "rollout.key_file: the builtin"),
        ({"admin_key_file": "k"}, "rollout.admin_key_file: the builtin"),
        ({"backend": "sglang", "tp": 2}, "rollout.tp: 2 devices for one server, but this machine has no GPU"),
        ({"backend": "vllm", "key_file": "k"}, "rollout.key_file: keys are of servers that you run"),
        (
            {"backend": "vllm", "url": "http://h:1", "servers": 2},
            "rollout.servers: this is for servers that lorad",
        ),
        ({"backend": "vllm", "url": "http://h:1", "tp": 2}, "rollout.tp: this is for servers that lorad"),
        (
            {"backend": "vllm", "url": "http://h:1", "engine_args": {"a": 1}},
            "rollout.engine_args: this is for",
        ),
        ({"backend": "vllm", "url": "localhost:1"}, "rollout.url: 'localhost:1' is no address"),
        ({"backend": "vllm", "url": "http://h:99999"}, "is no address"),
        ({"backend": "vllm", "url": "http://h:1/v1"}, "has more after the port"),
        ({"backend": "vllm", "url": "unix:s"}, "is no absolute path"),
        ({"backend": "vllm", "url": ["http://h:1", "http://h:1/"]}, "is there twice"),
        ({"backend": "sglang", "engine_args": {"uds": "/s"}}, "config.yaml names no python for sglang"),
    ],
)
def test_keys_of_another_backend_are_refused(rollout: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in str(refusal(tmp_path, rollout))


@pytest.mark.parametrize(
    ("backend", "mode", "says"),
    [
        ("sglang", "fused", "fused is one process"),
        ("builtin", "resident", "resident is for an engine beside"),
        ("builtin", "timesliced", "timesliced is for an engine beside"),
    ],
)
def test_a_pool_mode_of_other_backends_is_refused(backend: str, mode: str, says: str, tmp_path: Path) -> None:
    assert f"pool.mode: {says}" in str(refusal(tmp_path, {"backend": backend}, pool={"mode": mode}))


def test_users_own_server_is_never_put_to_sleep(tmp_path: Path) -> None:
    rollout = {"backend": "sglang", "url": "http://localhost:1"}
    assert "put to sleep a server that you run" in str(
        refusal(tmp_path, rollout, pool={"mode": "timesliced"})
    )


def test_password_in_a_url_is_refused_unquoted(tmp_path: Path) -> None:
    said = refusal(tmp_path, {"backend": "vllm", "url": "http://me:secret@h:1"})
    assert "rollout.key_file" in said.hint and "secret" not in str(said)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_installed_server_is_fit_to_run(backend: str, install: Any, tmp_path: Path) -> None:
    install(backend)
    facts = check(tmp_path, {"backend": backend})
    assert facts.linears == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (facts.max_positions, facts.warnings) == (2048, [])


def test_each_server_needs_memory_for_its_base(install: Any, tmp_path: Path) -> None:
    install("sglang")
    one, three = (check(tmp_path, {"backend": "sglang", "servers": n}).memory_parts for n in (1, 3))
    base = read_facts(resolve("builtin:tiny")).bytes("float32")
    assert one["bases"] == 2 * base and three["bases"] == 4 * base
    assert three["processes"] > one["processes"] > check(tmp_path, {}).memory_parts["processes"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_for_adapters_on_experts_is_counted(backend: str, install: Any, tmp_path: Path) -> None:
    install(backend)
    moe = resolve("builtin:tiny-moe")
    more = {"model": {"path": "builtin:tiny-moe"}, "lora": {"rank": 17}}
    facts = read_facts(moe)
    dense = {**more, "lora": {"rank": 17, "exclude_modules": ["*.experts.*"]}}
    with_them, without = (check(tmp_path, {"backend": backend}, **s) for s in (more, dense))
    assert (len(with_them.modules), len(without.modules)) == (48, 12)
    assert with_them.of_experts == ["down_proj", "gate_proj", "up_proj"] == without.of_experts
    buffers = SERVER_SLOTS * 32 * sum(map(sum, facts.experts.values()))
    trained = with_them.adapter_parameters - without.adapter_parameters
    assert trained == (17 // facts.experts_per_token) * sum(map(sum, facts.experts.values()))
    more = {name: size - without.memory_parts.get(name, 0) for name, size in with_them.memory_parts.items()}
    assert more["expert buffers"] == 4 * buffers and more["adapter"] == more["versions"] == 16 * trained
    assert with_them.memory_needed - without.memory_needed == 4 * (8 * trained + buffers)


@pytest.mark.parametrize(
    ("backend", "module", "counts"),
    [
        ("sglang", "model.layers.1.mlp.shared_experts.gate_proj", True),
        ("sglang", "model.layers.0.mlp.down_proj", True),
        ("sglang", "model.layers.0.self_attn.q_proj", False),
        ("vllm", "model.layers.1.mlp.shared_experts.gate_proj", False),
    ],
)
def test_sglang_needs_memory_for_experts_beside(
    tmp_path: Path, backend: str, module: str, counts: bool
) -> None:
    make_model(tmp_path, "glm4_moe")
    facts, spec = read_facts(tmp_path), convert({"rollout": {"backend": backend}, "lora": {"rank": 16}})
    buffers = SERVER_SLOTS * 16 * sum(map(sum, facts.experts.values())) * 4
    needed = pool_memory(spec, facts, AdapterConfig(16, 32.0, (module,)), Numbers(0), STEP, "cpu")
    assert needed.get("expert buffers", 0) == buffers * counts


@pytest.mark.parametrize(
    ("device", "trainer", "mode", "bases"),
    [
        ("cuda", "fsdp", "auto", 1),
        ("cuda", "fsdp", "resident", 2),
        ("cuda", "builtin", "auto", 2),
        ("cpu", "fsdp", "auto", 2),
    ],
)
def test_bases_that_take_turns_count_once(device: str, trainer: str, mode: str, bases: int) -> None:
    """The ranks' base leaves a GPU while the server is awake; the builtin trainer's stays."""
    facts = read_facts(resolve("builtin:tiny"))
    asked = {"trainer": {"backend": trainer}, "rollout": {"backend": "sglang"}, "pool": {"mode": mode}}
    spec = convert(asked | {"model": {"dtype": "float32"}})
    needed = pool_memory(spec, facts, AdapterConfig(16, 32.0, ()), Numbers(0), STEP, device)
    assert needed["bases"] == bases * facts.bytes("float32")


@pytest.mark.parametrize(("split", "who"), [(True, "the trainer would need"), (False, "the pool would need")])
def test_what_no_gpu_holds_is_refused(split: bool, who: str, install: Any, tmp_path: Path) -> None:
    """A GPU of 600 kB has no room for the base, nor for what training takes."""
    install("vllm")
    spec = {"rollout": {"backend": "vllm"}, "pool": {"mode": "split" if split else "resident"}}
    machine: dict[str, Any] = {"device": "cuda:0", "devices": 2, "cwd": tmp_path}
    with pytest.raises(SpecError, match=who):
        preflight(convert(spec), **machine, available=600_000)
    preflight(convert(spec), **machine, available=80 << 30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_older_server_is_warned_of(backend: str, install: Any, tmp_path: Path) -> None:
    install(backend, "0.4.10")
    (warning,) = check(tmp_path, {"backend": backend}).warnings
    assert "0.4.10" in warning and SERVERS[backend].tried in warning
    assert not is_older(f"{SERVERS[backend].tried}.post1+cpu", backend)
    assert not is_older("0.100.0rc1", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_server_is_refused_with_install_commands(backend: str, home: Path, tmp_path: Path) -> None:
    lines = install_lines(backend)
    for python in ("", "/no/python", sys.executable):
        named = {"python": python} if python else {}
        (home / "config.yaml").write_text(json.dumps({"backends": {backend: named}}))
        said = refusal(tmp_path, {"backend": backend})
        assert str(said).startswith("rollout.backend: ") and all(line in said.hint for line in lines)


def test_file_other_than_python_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such luck >&2; exit 3\n")
    python.chmod(0o755)
    with pytest.raises(SpecError, match="is no Python that works: no such luck"):
        installed_version("vllm", python)


def test_a_cpu_build_under_another_name_counts(install: Any) -> None:
    assert (
        installed_version("vllm", install("vllm", "0.32.0", distribution=SERVERS["vllm"].distributions[1]))
        == "0.32.0"
    )


def test_install_lines_are_for_the_device(tmp_path: Path) -> None:
    for backend in BACKENDS:
        assert f"{backend}-cu.txt" in "\n".join(install_lines(backend, gpu=True))
        assert install_lines(backend, gpu=True) != install_lines(backend, gpu=False)


def test_install_commands_work_without_the_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout() == REPOSITORY
    monkeypatch.setattr(recipes, "checkout", lambda: None)
    for backend, gpu in (("vllm", True), ("vllm", False), ("sglang", True)):
        lines = install_lines(backend, gpu=gpu)
        assert not [line for line in lines if ".ci/" in line or "tests/" in line or "$PWD" in line]
        assert any("-m pip install " in line for line in lines) and "backends:" in lines
    assert "`lorad backends install vllm`" in install_lines("sglang", gpu=False)[-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_flags_set_by_lorad_are_refused_however_written(backend: str, install: Any, tmp_path: Path) -> None:
    install(backend)
    for flag in ("max-lora-rank", "--max_lora_rank", "max-lora-ra", "host"):
        said = refusal(tmp_path, {"backend": backend, "engine_args": {flag: "secret"}})
        assert f"rollout.engine_args: {flag}" in str(said) and "secret" not in str(said) + said.hint
    check(tmp_path, {"backend": backend, "engine_args": {"seed": 3}})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flag", ["quantization", "-q", "quantization_config", "torchao_config"])
def test_servers_may_not_round_their_base(backend: str, flag: str, install: Any, tmp_path: Path) -> None:
    install(backend)
    said = refusal(tmp_path, {"backend": backend, "engine_args": {flag: "w8a8_int8"}})
    assert f"by {flag} {backend} rounds weights or activations" in str(said)
    assert "model.quantize" in str(said.hint)


def test_what_a_server_can_not_sample_is_refused(install: Any, tmp_path: Path) -> None:
    install("sglang")
    said = refusal(tmp_path, {"backend": "sglang", "stop": [f"{i};" for i in range(33)]})
    assert "rollout: sglang cannot sample like this: " in str(said)


def test_a_rank_above_all_servers_is_refused(install: Any, tmp_path: Path) -> None:
    install("vllm")
    assert "lora.rank: 600" in str(refusal(tmp_path, {"backend": "vllm"}, lora={"rank": 600}))


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (None, 0o600, "No such file"),
        ("key", 0o640, "readable by others"),
        ("\n", 0o600, "holds no key"),
        ("a\nb\n", 0o600, "holds no key"),
    ],
)
def test_unsafe_or_unusable_key_file_is_refused(
    text: str | None, mode: int, says: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
        (tmp_path / "key").chmod(mode)
    for key in ("key_file", "admin_key_file"):
        assert says in str(refusal(tmp_path, {"backend": "sglang", "url": "http://localhost:1", key: "key"}))


class Sglang(BaseHTTPRequestHandler):
    """What an SGLang server says of itself; 401 for all but the key `key`."""

    info: ClassVar[dict[str, Any]] = {"version": "0.5.23", "enable_lora": True, "dp_size": 1}
    tokens: ClassVar[int] = 2056

    def do_GET(self) -> None:
        models = {"data": [{"id": "m", "root": "m", "parent": None, "max_model_len": self.tokens}]}
        answers: dict[str, Any] = {"/server_info": self.info, "/v1/models": models}
        keyed = self.headers["Authorization"] == "Bearer key"
        self.send_response(200 if keyed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(answers[self.path] if keyed else {"error": "Unauthorized"}).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def with_key(directory: Path, text: str = "key\n") -> dict[str, Any]:
    (directory / "key").write_text(text)
    (directory / "key").chmod(0o600)
    return {"backend": "sglang", "key_file": "key"}


def test_users_own_server_needs_no_python_or_memory(tmp_path: Path) -> None:
    with serving(Sglang) as url:
        facts = check(tmp_path, {**with_key(tmp_path), "url": [url]})
    assert facts.memory_needed == check(tmp_path, {}).memory_needed


def test_url_without_a_fitting_server_is_refused(tmp_path: Path) -> None:
    rollout = with_key(tmp_path)
    with serving(Sglang) as url:
        pass
    assert f"no sglang server answers at {url}" in str(refusal(tmp_path, {**rollout, "url": url}))
    assert "no sglang server answers" in str(refusal(tmp_path, {**rollout, "url": f"unix:{tmp_path}/none"}))


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({}, "other", "rollout.key_file: the server at"),
        ({"info": {"version": "0.5.23"}}, "key", "takes no adapters while it runs: no --enable-lora"),
        ({"tokens": 108}, "key", "has room for 100 tokens, the run needs 528"),
        ({"info": {"something": "else"}}, "key", "its answers are not sglang's"),
    ],
)
def test_unfit_server_is_refused(change: dict[str, Any], key: str, says: str, tmp_path: Path) -> None:
    rollout = with_key(tmp_path, key)
    with serving(type("Changed", (Sglang,), change)) as url:
        assert says in str(refusal(tmp_path, {**rollout, "url": url}))


def test_kinds_have_their_dialects_and_options() -> None:
    assert [dialect_class(name).kind for name in BACKENDS] == [SERVERS[name] for name in BACKENDS]
    assert {*get_args(Server)} == {*SERVERS}
