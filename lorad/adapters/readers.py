"""Who reads a directory with an adapter on experts as it was trained: what PEFT 0.21 on transformers 5, vLLM
0.32 and SGLang 0.5.23 were seen to do.
"""

from collections.abc import Collection, Mapping, Sequence

from lorad.adapters.adapter import AdapterConfig, Outline
from lorad.adapters.served import partners_of
from lorad.adapters.targets import experts_of, leaf
from lorad.errors import AdapterRefused, SpecError

_FUSED = ("deepseek_v3", "glm4_moe", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types whose experts PEFT reads in its own form."""
_UNCONVERTED = "qwen2_moe"  # one of which PEFT takes no names of single experts
_SERVED = ("qwen3_moe",)  # model types whose experts servers were seen to read
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
    if lost := _lost(config, model_type):
        why = f"PEFT takes {lost[0]} for experts, because of its name, and leaves it as it is"
        raise SpecError(why, key="--format", hint="Export with --merge, or serve it with lorad.")


def refuse_interleaved(found: Outline, model_type: str, interleaved: Collection[str]) -> None:
    """Raise AdapterRefused for PEFT's own form where gate and up take turns in a base's tensors, and so in
    those of the adapter. interleaved: the model types of such bases.
    """
    if found.fused and model_type in interleaved:
        raise AdapterRefused(
            f"PEFT's own form of adapters on experts is not read for {model_type}",
            hint="train it without target_parameters, or with lorad",
        )


def why_not(
    config: AdapterConfig, shapes: _Shapes, model_type: str, joined: Mapping[str, Sequence[Sequence[str]]]
) -> dict[str, str]:
    """Return for each reader of a directory with names of single experts why it does not read what was
    trained; "" where it does.

    shapes: (out, in) of every linear of the base. joined: by server, see `served`.
    """
    is_partial = any(experts_of(name) for name in partners_of(config.modules, shapes, ()))
    parts = "some experts of a layer alone, or some of their linears" if is_partial else ""
    found = {"PEFT": parts or _why_not_peft(config, model_type)}
    for server, groups in sorted(joined.items()):
        lacks = [] if parts else partners_of(config.modules, shapes, groups)
        wants = f"it wants {leaf(lacks[0])} too" if lacks else ""
        found[server] = parts or _why_not_server(server, config, model_type) or wants
    return found


def _why_not_server(server: str, config: AdapterConfig, model_type: str) -> str:
    if model_type not in _SERVED:
        return f"experts of {model_type or 'this model'} were not tried"
    if server == "sglang" and config.expert_rank is not None:
        return "it has one rank for all modules"
    return "it knows no rsLoRA" if config.rslora and server == "sglang" else ""


def _why_not_peft(config: AdapterConfig, model_type: str) -> str:
    if model_type not in _FUSED or model_type == _UNCONVERTED:
        return f"it does not convert experts of {model_type or 'this model'}"
    if lost := _lost(config, model_type):
        return f"it takes {lost[0]} for experts"
    return "it takes no dropout on experts" if config.dropout else ""


def _lost(config: AdapterConfig, model_type: str) -> list[str]:
    """Return the linears beside experts that have names of theirs, which PEFT converts."""
    if model_type == _UNCONVERTED:
        return []
    return [one for one in config.modules if not experts_of(one) and leaf(one) in _OF_EXPERTS]
