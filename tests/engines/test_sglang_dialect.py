"""How SGLang is started and spoken to, without a server: the flags, what is refused, what replies mean."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from lorad.engines.remote.dialect import SamplePiece, ServerSettings, summed
from lorad.engines.remote.http import Address, Http, ServerRefused
from lorad.engines.sglang import launch, replies
from lorad.engines.sglang.dialect import SglangDialect
from lorad.errors import LoradError
from lorad.models.directory import resolve
from lorad.protocol.batch import Sampling

TINY, TINY_MOE = resolve("builtin:tiny"), resolve("builtin:tiny-moe")
SETTINGS = ServerSettings(
    model=TINY,
    dtype="float32",
    device="cpu",
    context_length=512,
    max_rank=16,
    targets=("q_proj", "v_proj"),
    slots=3,
    max_versions=6,
    memory_fraction=0.5,
)
OWN_END = {"type": "stop", "matched": 1}  # the model's end token


def flags(**changes: Any) -> dict[str, list[str]]:
    """flag -> its values"""
    settings = msgspec.structs.replace(SETTINGS, **changes)
    found: dict[str, list[str]] = {}
    for word in SglangDialect().command("python", settings, Path("/run/s"))[2:]:
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            next(reversed(found.values())).append(word)
    return found


def reply(
    tokens: list[int], count: int, finish: dict[str, Any] | None = None, logprob: Any = -1.0
) -> dict[str, Any]:
    logprobs = [[logprob, token, None] for token in tokens]
    meta = {"completion_tokens": count, "finish_reason": finish, "output_token_logprobs": logprobs}
    return {"output_ids": tokens, "meta_info": meta}


@contextlib.asynccontextmanager
async def server(
    socket: Path, answers: list[Any], bodies: list[Any], path: str = "/generate"
) -> AsyncIterator[Http]:
    """Answers with `answers` in turn, a number being the status of the next; what it was asked is put into
    `bodies`.
    """

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        first = answers.pop(0)
        return (
            web.json_response(answers.pop(0), status=first)
            if isinstance(first, int)
            else web.json_response(first)
        )

    app = web.Application()
    app.router.add_post(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    http = Http(Address(socket=socket))
    try:
        yield http
    finally:
        await http.close()
        await runner.cleanup()


async def sampled(http: Http, sampling: Sampling) -> list[SamplePiece]:
    return [piece async for piece in SglangDialect().sample(http, "r", "run@1", [5, 9], 2**64 - 1, sampling)]


def test_server_listens_only_on_the_given_socket() -> None:
    argv = SglangDialect().command("/venv/bin/python", SETTINGS, Path("/run/s"))
    assert (
        argv[0] == "/venv/bin/python"
        and Path(argv[1]).name == "launch.py"
        and argv[2:4] == ["--uds", "/run/s"]
    )
    assert not {"--host", "--port", "--api-key"} & set(argv)


def test_server_has_room_for_base_and_successor() -> None:
    found = flags(slots=3, max_versions=6)
    assert found["max-loras-per-batch"] == ["4"] and int(found["max-loaded-loras"][0]) > 6
    assert int(flags(slots=9, max_versions=2)["max-loaded-loras"][0]) >= 10


def test_user_flags_replace_add_and_remove() -> None:
    own = {
        "mem_fraction_static": 0.4,
        "chunked-prefill-size": 512,
        "sleep-on-idle": False,
        "enable-metrics": None,
        "json-model-override-args": {"rope_theta": 1e6},
    }
    found = flags(engine_args={**own, "trust_remote_code": True, "lora_target_modules": ["q_proj", "o_proj"]})
    assert found["mem-fraction-static"] == ["0.4"] and found["chunked-prefill-size"] == ["512"]
    assert found["trust-remote-code"] == [] and found["lora-target-modules"] == ["q_proj", "o_proj"]
    assert found["json-model-override-args"] == ['{"rope_theta": 1000000.0}']
    assert not {"sleep-on-idle", "enable-metrics"} & set(found)


def test_experts_take_their_own_flags_on_a_gpu() -> None:
    targets = ("experts", "q_proj", "up_proj")
    found = flags(device="cuda:0", targets=targets)
    assert found["lora-backend"] == ["triton"] and found["lora-use-virtual-experts"] == []
    assert found["lora-target-modules"] == ["q_proj", "up_proj"]
    assert "lora-backend" not in flags(device="cuda:0")
    assert flags(targets=targets)["lora-backend"] == ["torch_native"]


def test_linears_of_delta_nets_are_found_by_sglang() -> None:
    assert flags(targets=("in_proj_qkv", "in_proj_z", "q_proj"))["lora-target-modules"] == ["all"]
    assert flags()["lora-target-modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_states_have_the_dtype_of_the_base(dtype: str) -> None:
    settings = msgspec.structs.replace(SETTINGS, dtype=dtype)
    assert SglangDialect().environment(settings)["SGLANG_MAMBA_CONV_DTYPE"] == dtype


def mended(**changes: Any) -> set[str]:
    """What launch.py is told to make up for."""
    told = SglangDialect().environment(msgspec.structs.replace(SETTINGS, **changes))
    return {name for name in told if name.startswith("LORAD_")} - {"LORAD_DEVICE_SHARE"}


def test_launcher_mends_what_sglang_lacks_for_mixtures() -> None:
    assert mended() == set() and mended(model=TINY_MOE) == {"LORAD_TIED", "LORAD_EXPERTS"}
    assert mended(model=TINY_MOE, device="cuda:0") == {"LORAD_TIED"}


def test_a_gpu_server_sees_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = msgspec.structs.replace(SETTINGS, device="cuda:2", tp=2)
    assert SglangDialect().environment(settings)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    told = SglangDialect().environment(settings)
    assert told["CUDA_VISIBLE_DEVICES"] == "6,7" and told["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"


def test_a_gpu_server_that_sleeps_keeps_its_weights() -> None:
    found = flags(device="cuda:0", sleep=True)
    assert {"enable-memory-saver", "enable-weights-cpu-backup"} <= set(found)
    assert "enable-memory-saver" not in flags(device="cuda:0")
    assert found["sampling-backend"] == ["pytorch"]  # others ignore seeds


@pytest.mark.parametrize(
    "name", ["host", "uds", "admin-api-key", "lora-paths", "dp-size", "tokenizer-worker-num"]
)
def test_what_lorad_relies_on_is_reserved(name: str) -> None:
    assert name in SglangDialect.reserved


@pytest.mark.parametrize("sampling", [{"stop": ("",)}, {"stop": tuple("abcdefg" * 5)}, {"top_p": 0.0}])
def test_sampling_the_server_refuses_is_found_before(sampling: dict[str, Any]) -> None:
    assert SglangDialect().check(Sampling(max_new_tokens=4, **sampling), SETTINGS)


def test_ordinary_sampling_is_taken() -> None:
    assert SglangDialect().check(Sampling(max_new_tokens=4, top_p=0.5, stop=("x",)), SETTINGS) == ""


async def test_sample_continues_after_the_models_end_token(tmp_path: Path) -> None:
    bodies: list[Any] = []
    answers = [reply([8, 1], 2, OWN_END), reply([7, 6], 2, {"type": "stop", "matched": 6})]
    async with server(tmp_path / "s", answers, bodies) as http:
        made = await sampled(http, Sampling(max_new_tokens=9, stop_token_ids=(6,), stream=False))
    assert [piece.tokens for piece in made] == [[8, 1], [7, 6]] and [p.finish for p in made] == [None, "stop"]
    assert bodies[1]["input_ids"] == [5, 9, 8, 1] and bodies[1]["sampling_params"]["max_new_tokens"] == 7
    # the server aborts the id of a stream two seconds after its end
    assert bodies[0]["rid"] != bodies[1]["rid"]


async def test_end_token_in_last_place_finishes_by_length(tmp_path: Path) -> None:
    async with server(tmp_path / "s", [reply([8, 1], 2, OWN_END)], []) as http:
        made = await sampled(http, Sampling(max_new_tokens=2, stop_token_ids=(6,), stream=False))
    assert [piece.finish for piece in made] == ["length"]


async def test_every_parameter_is_said(tmp_path: Path) -> None:
    bodies: list[Any] = []
    async with server(tmp_path / "s", [reply([8], 1, {"type": "length"})], bodies) as http:
        await sampled(http, Sampling(max_new_tokens=1, stream=False))
    params = bodies[0]["sampling_params"]
    assert params["top_k"] == -1 and params["min_p"] == 0.0 and params["repetition_penalty"] == 1.0
    assert params["ignore_eos"] and params["sampling_seed"] == 2**63 - 1 and bodies[0]["lora_path"] == "run@1"


async def test_top_1_keeps_log_probabilities_at_its_temperature(tmp_path: Path) -> None:
    bodies: list[Any] = []
    async with server(tmp_path / "s", [reply([8], 1, {"type": "length"})], bodies) as http:
        await sampled(http, Sampling(max_new_tokens=1, temperature=0.5, top_k=1, stream=False))
    assert bodies[0]["sampling_params"]["top_k"] == -1 and bodies[0]["sampling_params"]["top_p"] < 1e-6


@pytest.mark.parametrize("logprob", [None, "NaN"])
async def test_a_sample_without_log_probabilities_is_refused(tmp_path: Path, logprob: Any) -> None:
    async with server(tmp_path / "s", [reply([8], 1, {"type": "length"}, logprob)], []) as http:
        with pytest.raises(LoradError):
            await sampled(http, Sampling(max_new_tokens=1, stream=False))


@pytest.mark.parametrize("before", ["never loaded: run@1\nAll loaded adapters: ", "no run@1. Loaded LoRAs: "])
# only the beginning of a long answer is kept, which is no JSON then
@pytest.mark.parametrize("many", [1, 1000])
async def test_refusal_names_no_adapters_of_others(tmp_path: Path, before: str, many: int) -> None:
    message = f"{before}dict_keys({['secret@3'] * many})"
    async with server(tmp_path / "s", [400, {"error": {"message": message}}], []) as http:
        with pytest.raises(ServerRefused) as refused:
            await sampled(http, Sampling(max_new_tokens=1, stream=False))
    assert refused.value.code == 400 and "run@1" in str(refused.value)
    assert "secret" not in str(refused.value) + refused.value.text


async def test_last_token_of_the_vocabulary_is_scored(tmp_path: Path) -> None:
    meta = {"input_token_logprobs": [[None, 9, None], [-2.0, 7, None], [-3.0, 0, None]]}
    async with server(tmp_path / "s", [{"output_ids": [], "meta_info": meta}] * 2, []) as http:
        assert (await SglangDialect().score(http, "r", None, [5, 9], [7, 127])).tolist() == [-2.0, -3.0]
        with pytest.raises(LoradError):
            await SglangDialect().score(http, "r", None, [5, 9], [8, 127])


async def test_scores_are_those_of_the_completion(tmp_path: Path) -> None:
    meta = {"input_token_logprobs": [[None, 9, None], [-2.0, 7, None], [None, 8, None]]}
    bodies: list[Any] = []
    async with server(tmp_path / "s", [{"output_ids": [], "meta_info": meta}], bodies) as http:
        scores = await SglangDialect().score(http, "r", None, [5, 9], [7, 8])
    assert scores.dtype == np.float32 and scores[0] == -2.0 and np.isnan(scores[1])
    assert bodies[0]["input_ids"] == [5, 9, 7, 8] and bodies[0]["logprob_start_len"] == 1


async def test_abort_is_repeated_until_the_sample_ends(tmp_path: Path) -> None:
    dialect, asked = SglangDialect(), list[Any]()
    dialect._running["r"] = "id"

    async def end() -> None:
        while len(asked) < 2:  # noqa: ASYNC110 (the list is the record)
            await asyncio.sleep(0.01)
        dialect._running.clear()

    async with server(tmp_path / "s", [{}] * 20, asked, "/abort_request") as http:
        await asyncio.gather(dialect.abort(http, ["r", "unknown"]), end())
    assert [body["rid"] for body in asked] == ["id", "id"]


def test_cumulative_and_incremental_replies_give_equal_news() -> None:
    whole, new = replies.parsed(reply([4, 5, 6], 3)), replies.parsed(reply([6], 3))
    assert replies.news(whole, 2) == replies.news(new, 2) == ([6], [-1.0])
    assert replies.news(new, 3) == ([], [])


def test_an_error_in_a_stream_is_a_refusal() -> None:
    with pytest.raises(ServerRefused, match="too long"):
        replies.parsed({"error": {"message": "too long", "code": 400, "type": "invalid_request_error"}})


def test_metrics_of_one_name_are_added_up() -> None:
    text = '# TYPE sglang:x counter\nsglang:x_total{a="1"} 2.0\nsglang:x_total{a="2"} 3.0\nsglang:y 1e3\n'
    assert summed(text) == {"sglang:x_total": 5.0, "sglang:y": 1000.0}
    assert summed("Bad gateway\n" + text) == summed(text)


def test_unseeded_request_gets_one_seed_on_all_ranks() -> None:
    class Parameters(msgspec.Struct):
        sampling_seed: int | None

    class Request(msgspec.Struct):
        rid: str
        sampling_params: Parameters

    unseeded = [launch.seed_of(Request(rid, Parameters(None))) for rid in ("a", "a", "b")]
    assert unseeded[0] == unseeded[1] != unseeded[2]
    assert launch.seed_of(Request("a", Parameters(7))) == 7


def test_memory_share_becomes_one_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang takes its share of what is free when it starts, lorad grants one of the whole device."""
    gpus = {0: SimpleNamespace(total=80, free=80), "GPU-b": SimpleNamespace(total=80, free=50)}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=gpus.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = {devices: launch.share_of_free(0.4, devices.split(",")) for devices in ("0", "GPU-b", "0,GPU-b")}
    assert found == {"0": 0.4, "GPU-b": pytest.approx(0.64), "0,GPU-b": 0.4}
    assert launch.share_of_free(0.7, ["GPU-b"]) == 0.95


def test_several_gpus_are_named_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"GPU-a": 2, "GPU-b": 0}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetIndex=index.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    found = {}
    for names in ("GPU-a,GPU-b", "GPU-b", "3,GPU-a", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        launch.prepare_environment([])
        found[names] = os.environ["CUDA_VISIBLE_DEVICES"]
    assert found == {"GPU-a,GPU-b": "2,0", "GPU-b": "GPU-b", "3,GPU-a": "3,2", "": ""}
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("sleep", [True, False])
def test_sleeping_server_has_no_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, name: str, sleep: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = "max_split_size_mb:128,expandable_segments:True,backend:native"
    monkeypatch.setenv(name, own)
    settings = msgspec.structs.replace(SETTINGS, device="cuda:0", sleep=sleep)
    launch.prepare_environment(SglangDialect().command("python", settings, Path("/run/s")))
    assert os.environ[name] == ("max_split_size_mb:128,backend:native" if sleep else own)


@pytest.mark.system
def test_launcher_says_what_it_takes_away(tmp_path: Path) -> None:
    """Before SGLang is imported, which is not installed here."""
    command = [sys.executable, launch.__file__, "--uds", str(tmp_path / "s"), "--enable-memory-saver"]
    env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "lorad: expandable_segments is taken out of PYTORCH_CUDA_ALLOC_CONF" in done.stderr
    assert "No module named 'sglang'" in done.stderr


def test_own_memory_fraction_is_left_alone() -> None:
    def told(**changes: Any) -> str | None:
        settings = msgspec.structs.replace(SETTINGS, **changes)
        return SglangDialect().environment(settings).get("LORAD_DEVICE_SHARE")

    assert told(device="cuda:0") == "0.5000" and told() is None
    assert told(device="cuda:0", engine_args={"mem_fraction_static": 0.3}) is None


def test_the_launcher_needs_a_socket() -> None:
    done = subprocess.run(
        [sys.executable, launch.__file__, "--port", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "--uds SOCKET" in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"enable_http2": True},
        {"grpc_port": 5},
        {"tokenizer_worker_num": 2},
        {"sampling_backend": "flashinfer"},
    ],
)
def test_launcher_refuses_other_listeners_and_seedless_sampling(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"sampling_backend": "pytorch", "skip_server_warmup": True}
    launch.check_arguments(type("ServerArgs", (), good))
    with pytest.raises(SystemExit):
        launch.check_arguments(type("ServerArgs", (), {**good, **change}))
