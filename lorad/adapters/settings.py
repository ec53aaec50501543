"""The keys of `adapter_config.json`: what each does to an adapter, and which values are refused.

A test compares the tables here with the fields of PEFT's own LoraConfig.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

from lorad.bounds import ALPHA, CONFIG_BYTES
from lorad.errors import AdapterRefused
from lorad.files import read_file

READ = frozenset(
    (
        "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "exclude_modules",
        "layers_to_transform", "rank_pattern", "alpha_pattern", "target_parameters",
        "init_lora_weights",
    )
)  # fmt: skip
"""Keys that say what an adapter computes, and that are read."""
WITHOUT_EFFECT = frozenset(
    (
        "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
        "runtime_config", "ensure_weight_tying", "megatron_core", "loftq_config", "eva_config",
        "corda_config", "lora_ga_config", "velora_config", "qalora_group_size",
        # of ms-swift
        "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
    )
)  # fmt: skip
"""Keys that say where an adapter is from and how it was trained: any value computes the same."""
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "peft_type": (
        ("LORA",),
        "only LoRA adapters are loaded; train one with peft's LoraConfig, or make one with peft's "
        "save_as_lora, which can convert some types",
    ),
    "use_dora": ((None, False, True), "it is neither true nor false: export the adapter again"),
    "use_rslora": ((None, False, True), "it is neither true nor false: export the adapter again"),
    "bias": ((None, "none"), "biases are not adapted; train with bias='none'"),
    "lora_bias": ((None, False), "biases are not adapted; train with lora_bias=False"),
    "modules_to_save": ((None, []), "whole modules do not fit an adapter; train with modules_to_save=None"),
    "layer_replication": ((None, []), "replicated layers change the base; train without layer_replication"),
    "trainable_token_indices": (
        (None, [], {}),
        "embeddings are not adapted; train without trainable_token_indices",
    ),
    "use_qalora": ((None, False), "QALoRA pools the input; train with use_qalora=False"),
    "fan_in_fan_out": (
        (None, False),
        "weights stored as (in, out) are not read; train with fan_in_fan_out=False",
    ),
    "alora_invocation_tokens": (
        (None,),
        "an activated LoRA changes only what follows its invocation tokens, which is not computed; train "
        "without them",
    ),
    "layers_pattern": (
        (None, "", [], "layers", ["layers"], "h", ["h"]),
        "layers are told by the first number of a name; name them in full in target_modules",
    ),
    "kasa_config": (
        (None, {}),
        "KaSA changes the base itself and has values between A and B; train without it",
    ),
    "use_bdlora": ((None, False, {}), "block-diagonal LoRA is not computed; train without use_bdlora"),
    "monteclora_config": (
        (None, {}),
        "MonteCLoRA has parts beside A and B that are not computed; train without it",
    ),
    "arrow_config": (
        (None, {}),
        "Arrow routes each token between adapters; give one adapter without a router",
    ),
    "megatron_config": (
        (None, {}),
        "its tensors may be those of one rank of Megatron: convert the adapter to a Hugging Face model's",
    ),
}
"""Keys that change what an adapter computes, the values that change nothing, and what to do about others."""
_KEEP_BASE = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_settings(path: Path) -> dict[str, Any]:
    """Read `adapter_config.json`. Raises AdapterRefused, which names every key that lorad does not compute.

    These include unknown keys that have a value.
    """
    try:
        settings = json.loads(read_file(path, CONFIG_BYTES))
    except OSError as error:
        inner = sorted(path.parent.glob(f"*/{path.name}")) if path.parent.is_dir() else []
        hint = f"it may be {inner[-1].parent}" if inner else "give a PEFT adapter directory"
        raise AdapterRefused(f"{path}: not readable: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{path}: not JSON: {error}", hint="export the adapter again") from error
    if not isinstance(settings, dict):
        raise AdapterRefused(f"{path}: not a JSON object", hint="export the adapter again")
    if "lora_parameters" in settings:
        hint = "fuse it with mlx_lm.fuse and give the model, or transpose lora_a and lora_b into PEFT's form"
        raise AdapterRefused(f"{path}: it is an adapter of mlx, not of PEFT", hint=hint)
    if wrong := _wrong(settings):
        hints = dict.fromkeys(wrong.values())
        raise AdapterRefused(f"{path}: {'; '.join(wrong)}", hint="; ".join(hints))
    return settings


def _wrong(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a hint by a sentence for each wrong key, a start that changed the base, and wrong numbers."""
    wrong = {
        f"{key} is {short(settings[key])}": hint
        for key, (harmless, hint) in _REFUSED.items()
        if settings.get(key, harmless[0]) not in harmless
    }
    familiar = {*READ, *WITHOUT_EFFECT, *_REFUSED}
    unknown = [key for key, value in settings.items() if key not in familiar and value]
    advice = "take it out where it says nothing of what the adapter computes; else lorad cannot load it"
    wrong |= {f"{key:.60} is {short(settings[key])}, a key unknown here": advice for key in unknown[:5]}
    start = settings.get("init_lora_weights")
    word = str(start).lower().replace("-", "_")
    if word.startswith(_CHANGE_BASE):
        advice = "save it with path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        wrong[f"{start} changed the base itself"] = advice
    elif word not in _KEEP_BASE:
        advice = "set it to true where the base stayed as it was; else lorad cannot load the adapter"
        wrong[f"init_lora_weights is {short(start)}, which is unknown here"] = advice
    rank = settings.get("r")
    alpha = settings.get("lora_alpha")
    dropout = settings.get("lora_dropout") or 0.0
    again = "export the adapter again"
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        wrong[f"r is {short(rank)}, not a positive integer"] = again
    if alpha is None:
        wrong["lora_alpha is missing"] = (
            "write the alpha that it was trained with: readers take different ones"
        )
    elif not isinstance(alpha, int | float) or not 0 < alpha <= ALPHA:
        wrong[f"lora_alpha is {short(alpha)}, not a positive number up to {ALPHA}"] = again
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        wrong[f"lora_dropout is {short(dropout)}, not in [0, 1)"] = again
    return wrong
