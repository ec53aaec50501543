"""How lorad speaks to vLLM, as far as it shows without a server."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lorad.engines.remote.dialect import SamplePiece, ServerSettings
from lorad.engines.remote.http import ServerRefused
from lorad.engines.vllm import launch, replies
from lorad.engines.vllm.dialect import VllmDialect
from lorad.errors import LoradError
from lorad.models.directory import resolve
from lorad.protocol.batch import Sampling
from tests.models.bases import write_base

SETTINGS = ServerSettings(
    model=resolve("builtin:tiny"),
    dtype="float32",
    device="cpu",
    context_length=512,
    max_rank=12,
    targets=("q_proj", "v_proj"),
    slots=2,
    max_versions=4,
    memory_fraction=0.5,
)


def words(**changes: Any) -> list[str]:
    return VllmDialect().command("python", msgspec.structs.replace(SETTINGS, **changes), Path("/s/0.sock"))


def value_of(flag: str, argv: list[str]) -> str:
    return argv[argv.index(flag) + 1]


def test_a_server_listens_on_its_socket_alone() -> None:
    argv = words()
    assert value_of("--uds", argv) == "/s/0.sock"
    assert not {"--host", "--port", "--api-key"} & set(argv)


def test_the_highest_rank_is_one_that_vllm_takes() -> None:
    assert value_of("--max-lora-rank", words()) == "16"
    assert value_of("--max-lora-rank", words(max_rank=257)) == "320"


def test_targets_are_several_words() -> None:
    argv = words()
    place = argv.index("--lora-target-modules")
    assert argv[place + 1 : place + 3] == ["q_proj", "v_proj"]


def test_experts_are_a_target_of_their_own() -> None:
    argv = words(targets=("experts", "q_proj"))
    assert argv[argv.index("--lora-target-modules") + 1] == "experts"
    assert "--enable-mixed-moe-lora-format" in argv
    assert "--enable-mixed-moe-lora-format" not in words()


def test_experts_are_mended_on_a_cpu_alone() -> None:
    moe = msgspec.structs.replace(SETTINGS, model=resolve("builtin:tiny-moe"))
    on_gpu = msgspec.structs.replace(moe, device="cuda:0")
    found = ["LORAD_EXPERTS" in VllmDialect().environment(one) for one in (SETTINGS, moe, on_gpu)]
    assert found == [False, True, False]


def test_server_has_room_for_one_more_version() -> None:
    assert value_of("--max-cpu-loras", words()) == "5"
    assert value_of("--max-cpu-loras", words(slots=8)) == "9"


def test_logprobs_are_scaled_on_request() -> None:
    assert value_of("--logprobs-mode", words()) == "raw_logprobs"
    assert value_of("--logprobs-mode", words(scaled_logprobs=True)) == "processed_logprobs"


def test_sleep_is_asked_for_on_a_gpu_alone() -> None:
    assert "--enable-sleep-mode" in words(device="cuda:0", sleep=True)
    assert "--enable-sleep-mode" not in words(sleep=True)


@pytest.mark.parametrize(
    ("given", "there"),
    [
        ({"max_num_batched_tokens": 64}, ["--max-num-batched-tokens", "64"]),
        ({"--async-scheduling": True}, ["--async-scheduling"]),
        ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
        ({"enforce_eager": False}, ["--no-enforce-eager"]),
        ({"dtype": "bfloat16"}, ["--dtype", "bfloat16"]),
        ({"cudagraph-capture-sizes": [1, 2]}, ["--cudagraph-capture-sizes", "1", "2"]),
        ({"compilation-config": {"mode": 0}}, ["--compilation-config", '{"mode": 0}']),
    ],
)
def test_the_users_flags_are_passed_on(given: dict[str, Any], there: list[str]) -> None:
    argv = words(engine_args=given)
    assert argv.count(there[0]) == 1
    place = argv.index(there[0])
    assert argv[place : place + len(there)] == there


@pytest.mark.parametrize("value", [False, None])
def test_the_user_can_take_a_flag_away(value: bool | None) -> None:
    argv = words(engine_args={"kv_cache_memory_bytes": value})
    assert not [word for word in argv if "kv-cache" in word]


def test_each_server_sees_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    settings = msgspec.structs.replace(SETTINGS, device="cuda:1", tp=2)
    assert VllmDialect().environment(settings)["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert VllmDialect().environment(settings)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert VllmDialect().environment(settings)["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"


def test_a_server_asks_no_hub() -> None:
    environment = VllmDialect().environment(SETTINGS)
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("scaled", "sampling", "refused"),
    [
        (False, Sampling(4, top_p=0.9, top_k=5), False),
        (False, Sampling(4, temperature=0.0, top_k=5), False),
        (False, Sampling(4, temperature=0.7), True),
        (True, Sampling(4, temperature=0.7), False),
        (True, Sampling(4, temperature=0.7, top_p=0.9), True),
        (True, Sampling(4, top_k=5), True),
        (True, Sampling(4, top_k=1), False),
        (True, Sampling(4, temperature=0.7, top_k=1), True),
        (True, Sampling(4, temperature=0.001), True),
        (False, Sampling(4, stop=("",)), True),
    ],
)
def test_sampling_without_right_log_probabilities_is_refused(
    scaled: bool, sampling: Sampling, refused: bool
) -> None:
    settings = msgspec.structs.replace(SETTINGS, scaled_logprobs=scaled)
    assert bool(VllmDialect().check(sampling, settings)) == refused


def completion(**choice: Any) -> dict[str, Any]:
    return {"choices": [choice]}


def test_sample_has_tokens_and_logprobs() -> None:
    data = completion(token_ids=[5, 1], logprobs={"token_logprobs": [-0.5, -2.0]}, finish_reason="stop")
    assert replies.piece(replies.choice(data, "/r")) == SamplePiece([5, 1], [-0.5, -2.0], "stop")


@pytest.mark.parametrize("values", [[None], [-9999.0], [], [-1.0, -1.0]])
def test_no_token_goes_without_a_finite_log_probability(values: list[float | None]) -> None:
    data = completion(token_ids=[5], logprobs={"token_logprobs": values})
    with pytest.raises(LoradError, match="finite"):
        replies.piece(replies.choice(data, "/r"))


@pytest.mark.parametrize("data", ["text", {}, {"choices": []}, completion(token_ids="5")])
def test_an_unknown_answer_is_an_error_in_words(data: Any) -> None:
    with pytest.raises(LoradError, match="a form that lorad does not know"):
        replies.choice(data, "/r")


def test_scores_are_those_of_the_completion() -> None:
    said = [
        None,
        {"7": {"logprob": -1.0}},
        {"8": {"logprob": -2.0}, "3": {"logprob": -0.1}},
        {"9": {"logprob": None}},
    ]
    found = replies.choice(completion(prompt_logprobs=said), "/r")
    assert replies.scores(found, [8, 9]).tolist() == pytest.approx([-2.0, np.nan], nan_ok=True)


def test_a_refusal_names_neither_paths_nor_other_adapters() -> None:
    body = json.dumps(
        {"error": {"message": "The model `/x/a` does not exist. Valid aliases: base, b@1.", "code": 404}}
    )
    error = replies.refusal(
        ServerRefused("/v1/completions answered 404: …", status=404, text=body), Path("/x/a")
    )
    assert error.code == 404
    assert (
        error.message
        == "/v1/completions answered 404: The model `the directory that it was given` does not exist."
    )


METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:num_requests_waiting{engine="0",model_name="base"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.25
vllm:prefix_cache_hits_total{engine="0",model_name="base"} 128.0
vllm:prompt_tokens_total{engine="0",model_name="base"} 512.0
vllm:generation_tokens_total{engine="0",model_name="base"} 1.2e+03
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a@1,b@2",waiting_lora_adapters=""} 20.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a@1",waiting_lora_adapters=""} 10.0
"""


def test_newest_metrics_line_of_adapters_counts() -> None:
    found = replies.metrics(METRICS)
    assert (found.running, found.waiting) == (3, 1)
    assert (found.cached_tokens, found.prompt_tokens, found.cache_used) == (128, 512, 0.25)
    assert (found.slots_used, found.slots) == (2, 4)
    assert replies.metrics("").running is None


def plain_expand(
    inputs: torch.Tensor, weights: torch.Tensor, outputs: torch.Tensor, indices: torch.Tensor
) -> None:
    outputs += torch.einsum("bi,boi->bo", inputs, weights[indices])


@pytest.mark.parametrize("indices", [[-1, 0, -1, 1], [-1, -1, -1, -1], [1, 0, 1, 1]])
def test_adapters_leave_rows_of_the_base_alone(indices: list[int]) -> None:
    inputs, weights, chosen = torch.ones(4, 3), torch.ones(2, 5, 3), torch.tensor(indices)
    weights[1] = np.nan if 1 not in indices else 2.0
    outputs = torch.zeros(4, 5)
    launch.of_adapters(plain_expand)(inputs, weights, outputs, chosen)
    assert outputs[:, 0].tolist() == [0.0 if index < 0 else 3.0 * (index + 1) for index in indices]


@pytest.mark.parametrize(("family", "has_towers"), [("gemma3", True), ("glm4", False)])
def test_towers_for_images_are_not_loaded(tmp_path: Path, family: str, has_towers: bool) -> None:
    write_base(tmp_path, family)
    assert ("--language-model-only" in words(model=tmp_path)) is has_towers
