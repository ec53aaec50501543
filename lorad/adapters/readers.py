"""Tells who reads an adapter on experts as it was trained: PEFT, vLLM and SGLang.

They were tried as PEFT 0.21 on transformers 5, vLLM 0.32 and SGLang 0.5.23.
"""

from collections.abc import Collection, Mapping

from lorad.adapters.adapter import AdapterConfig, Outline
from lorad.adapters.served import partners_of
from lorad.adapters.targets import experts_of, leaf
from lorad.errors import AdapterRefused, SpecError
from lorad.servers.table import SERVERS

_FUSED = ("deepseek_v3", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types whose experts PEFT reads in its own form."""
_UNCONVERTED = "qwen2_moe"  # one of which PEFT takes no names of single experts
_CONVERTED = {*_FUSED, "glm4_moe_lite", "qwen3_next"} - {_UNCONVERTED}
_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
_Shapes = Mapping[str, tuple[int, int]]


def refuse_fused(config: AdapterConfig, model_type: str) -> None:
    """Raise SpecError where PEFT would not read its own form as it was trained."""
    if not config.experts:
        raise SpecError(
            "the adapter is on no expert", key="--format", hint="Leave --format out: PEFT reads it."
        )
    if model_type not in _FUSED:
        why = f"it was tried with {', '.join(_FUSED)}, not with {model_type or 'a model without a type'}"
        raise SpecError(why, key="--format", hint="Leave --format out, or export with --merge.")
    if linears := taken_for_experts(config, model_type):
        why = f"PEFT takes {linears[0]} for experts, because of its name, and leaves it as it is"
        raise SpecError(why, key="--format", hint="Export with --merge, or serve it with lorad.")


def refuse_interleaved(outlined: Outline, model_type: str, interleaved: Collection[str]) -> None:
    """Raise AdapterRefused for PEFT's own form on a base of a type in `interleaved`.

    There gate and up take turns in the base's tensors, and so in the adapter's.
    """
    if outlined.fused and model_type in interleaved:
        raise AdapterRefused(
            f"PEFT's own form of adapters on experts is not read for {model_type}",
            hint="train it without target_parameters, or with lorad",
        )


def why_not(config: AdapterConfig, shapes: _Shapes, model_type: str) -> dict[str, str]:
    """Return by reader why it does not read names of single experts as they were trained; "" if it does.

    shapes: (out, in) of every linear of the base.
    """
    is_partial = any(experts_of(name) for name in partners_of(config.modules, shapes, ()))
    parts = "some experts of a layer alone, or some of their linears" if is_partial else ""
    reasons = {"PEFT": parts}
    if not parts:
        if model_type not in _FUSED or model_type == _UNCONVERTED:
            reasons["PEFT"] = f"it does not convert experts of {model_type or 'this model'}"
        elif linears := taken_for_experts(config, model_type):
            reasons["PEFT"] = f"it takes {linears[0]} for experts"
        elif config.dropout:
            reasons["PEFT"] = "it takes no dropout on experts"
    for name, server in sorted(SERVERS.items()):
        reasons[name] = parts
        if parts:
            continue
        if model_type not in server.expert_types:
            reasons[name] = f"experts of {model_type or 'this model'} were not tried"
        elif config.expert_rank is not None and not server.reads_ranks:
            reasons[name] = "it has one rank for all modules"
        elif config.rslora and not server.reads_rslora:
            reasons[name] = "it knows no rsLoRA"
        elif lacks := partners_of(config.modules, shapes, server.joined):
            reasons[name] = f"it wants {leaf(lacks[0])} too"
    return reasons


def taken_for_experts(config: AdapterConfig, model_type: str) -> list[str]:
    """Return the linears beside experts that PEFT takes for experts, because of their names."""
    if model_type not in _CONVERTED:
        return []
    return [name for name in config.modules if not experts_of(name) and leaf(name) in _OF_EXPERTS]
