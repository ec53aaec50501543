"""Every public method of the official client, and every parameter: supported, refused in words, or of the
client alone. One that is in no list fails. `python client_coverage.py BASE`, as client_check.py.
"""

import datetime
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")
BASE = sys.argv[1]

SUPPORTED: dict[str, dict[str, str]] = {
    "ServiceClient": {
        "close": "status detail",
        "create_lora_training_client": "base_model rank seed train_mlp train_attn train_unembed "
        "user_metadata optimizer",
        "create_rest_client": "",
        "create_sampling_client": "model_path base_model retry_config record_stability_info",
        "create_training_client_from_state": "path base_model user_metadata weights_access_token optimizer",
        "create_training_client_from_state_with_optimizer": "path base_model user_metadata "
        "weights_access_token",
        "get_server_capabilities": "",
    },
    "TrainingClient": {
        "create_sampling_client": "model_path retry_config record_stability_info",
        "forward": "data loss_fn loss_fn_config",
        "forward_backward": "data loss_fn loss_fn_config",
        "forward_backward_custom": "data loss_fn loss_type_input",
        "get_info": "",
        "get_tokenizer": "",
        "load_state": "path weights_access_token",
        "load_state_with_optimizer": "path weights_access_token",
        "optim_step": "optim_params adam_params",
        "save_state": "name ttl_seconds overwrite user_metadata",
        "save_weights_and_get_sampling_client": "name retry_config record_stability_info kind",
        "save_weights_for_sampler": "name ttl_seconds user_metadata",
    },
    "SamplingClient": {
        "compute_logprobs": "prompt prompt_logprobs_last_n",
        "create": "holder model_path base_model sampling_session_id retry_config record_stability_info",
        "get_base_model": "",
        "get_tokenizer": "",
        "sample": "prompt num_samples sampling_params include_prompt_logprobs topk_prompt_logprobs "
        "topk_sample_logprobs target_prompt_logprobs prompt_alt_tokens_k prompt_logprobs_last_n",
    },
    "RestClient": {
        "delete_checkpoint": "training_run_id checkpoint_id",
        "delete_checkpoint_from_tinker_path": "tinker_path",
        "get_sampler": "sampler_id",
        "get_server_capabilities": "",
        "get_session": "session_id access_scope",
        "get_training_run": "training_run_id access_scope",
        "get_training_run_by_tinker_path": "tinker_path access_scope",
        "get_weights_info_by_tinker_path": "tinker_path",
        "list_checkpoints": "training_run_id",
        "list_sessions": "limit offset access_scope",
        "list_training_runs": "limit offset access_scope project_id",
        "list_user_checkpoints": "limit offset",
        "publish_checkpoint_from_tinker_path": "tinker_path",
        "set_checkpoint_ttl_from_tinker_path": "tinker_path ttl_seconds",
        "unpublish_checkpoint_from_tinker_path": "tinker_path",
    },
}
OF_THE_CLIENT = {
    *("get_telemetry", "get_console_url", "holder", "on_queue_state_change"),
    *("get_sampler_handle", "from_sampler_handle"),
}
DAY = datetime.date(2026, 1, 1)
PATH = "tinker://x:train:0/weights/one"


def refusals(service: Any, training: Any, sampler: Any, rest: Any) -> dict[str, Callable[[], Any]]:
    """Each thing that is refused, and how it is asked for; the answer must name lorad."""
    prompt, few = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=1)

    def sample(**more: Any) -> Any:
        return sampler.sample(prompt, 1, few, **more).result()

    return {
        "ServiceClient.copy_weights": lambda: service.copy_weights(PATH).result(),
        "TrainingClient.save_weights_external": lambda: training.save_weights_external("x").result(),
        "RestClient.assign_session_project": lambda: rest.assign_session_project("x", "y").result(),
        "RestClient.copy_weights": lambda: rest.copy_weights(PATH, "project").result(),
        "RestClient.export_session_trace": lambda: rest.export_session_trace("x").result(),
        "RestClient.get_audit_log": lambda: rest.get_audit_log("x", DAY).result(),
        "RestClient.get_billing_usage": lambda: _billing(rest),
        "RestClient.get_current_checkpoint_storage_usage": lambda: _storage(rest),
        "RestClient.get_external_weights_urls": lambda: rest.get_external_weights_urls(
            "tinker://x:train:0/external_weights/one"
        ).result(),
        "RestClient.search_sessions": lambda: rest.search_sessions(types.SessionSearchRequest()).result(),
        "kind=inflight": lambda: training.save_weights_and_get_sampling_client(kind="inflight").result(),
        "topk_sample_logprobs": lambda: sample(topk_sample_logprobs=2),
        "prompt_alt_tokens_k": lambda: sample(prompt_alt_tokens_k=2),
        "record_stability_info": lambda: (
            training.save_weights_and_get_sampling_client(record_stability_info=True)
            .result()
            .sample(prompt, 1, few)
            .result()
        ),
    }


REFUSED_BY_THE_CLIENT = {"ServiceClient.create_custom_loss", "RestClient.whoami"}
"""Refused before anything is asked: by flags that the door sends, or as keys are no tokens."""


def _billing(rest: Any) -> Any:
    return rest.get_billing_usage(DAY, DAY + datetime.timedelta(days=1)).result()


def _storage(rest: Any) -> Any:
    return rest.get_current_checkpoint_storage_usage().result()


def unknown(refused: set[str]) -> list[str]:
    """Name every method and parameter that no list has."""
    found = []
    for name, supported in SUPPORTED.items():
        kind = getattr(tinker, name)
        for method in dir(kind):
            plain = method.removesuffix("_async")
            if method.startswith("_") or plain in OF_THE_CLIENT or f"{name}.{plain}" in refused:
                continue
            if plain not in supported:
                found.append(f"{name}.{method}")
                continue
            parameters = inspect.signature(getattr(kind, method)).parameters.keys() - {"self", "cls"}
            found += [f"{name}.{method}({one})" for one in sorted(parameters - {*supported[plain].split()})]
    fields = {"SamplingParams": "max_tokens seed stop temperature top_k top_p"}
    fields["AdamParams"] = "learning_rate beta1 beta2 eps weight_decay grad_clip_norm"
    for name, known in fields.items():
        found += [f"{name}.{one}" for one in getattr(types, name).model_fields if one not in known.split()]
    return found


def main() -> None:
    os.environ["TINKER_PROJECT_ID"] = "project"
    service, rest = tinker.ServiceClient(), tinker.RestClient()
    training = service.create_lora_training_client(BASE, rank=4, seed=1).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    every = refusals(service, training, sampler, rest)
    assert not (left := unknown({*every} | REFUSED_BY_THE_CLIENT)), f"unknown: {left}"
    for name, ask in every.items():
        try:
            ask()
        except Exception as error:
            words = f"{error} {getattr(error, 'body', '')}"
            assert "lorad" in words, f"{name} is refused without words: {words}"
            print(f"{name}: {words[:150]}", flush=True)
        else:
            raise AssertionError(f"{name} is not refused")
    last = training.optim_step(types.AdamParams(learning_rate=0.0))  # no number is missing
    assert last.result().metrics
    print(f"all methods are known, with tinker {tinker.__version__}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the threads of some versions abort a process that ends
