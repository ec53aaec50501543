"""Finds Megatron's module of a logical name: it fuses q, k, v, and gate, up, also those of each expert."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lorad.errors import AdapterRefused
from lorad.trainers.sharded.body import MountKey

HEAD = "lm_head"
_IN_LAYER = {
    "self_attn.q_proj": ("self_attention.linear_qkv", "adapter_q"),
    "self_attn.k_proj": ("self_attention.linear_qkv", "adapter_k"),
    "self_attn.v_proj": ("self_attention.linear_qkv", "adapter_v"),
    "self_attn.o_proj": ("self_attention.linear_proj", ""),
    "mlp.gate_proj": ("mlp.linear_fc1", "adapter_gate"),
    "mlp.up_proj": ("mlp.linear_fc1", "adapter_up"),
    "mlp.down_proj": ("mlp.linear_fc2", ""),
}
"""Hugging Face's module of a layer -> Megatron's, and the member's name in Bridge's `CanonicalLoRA`."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
_MEGATRON_LAYER = re.compile(r"decoder\.layers\.\d+(?=\.|$)")
_EXPERTS = "experts.local_experts."
_LOCAL_EXPERT = re.compile(r"(.*\.mlp)\." + re.escape(_EXPERTS) + r"(\d+)(?=\.|$)")


@dataclass(frozen=True)
class MegatronModule:
    """A module of Megatron's that gets an adapter; one that is not fused has a member with an empty name."""

    path: str
    members: Mapping[str, str]  # the logical names by Bridge's, of the members that were asked for

    @property
    def is_of_expert(self) -> bool:
        return _EXPERTS in self.path


def _place(logical: str) -> tuple[str, str] | None:
    """Return the path of the Megatron module and the member's name there."""
    if logical == HEAD:
        return "output_layer", ""
    match = _LAYER.fullmatch(logical)
    expert = match and _EXPERT.fullmatch(match[2])
    inner = f"mlp.{expert[2]}" if expert else match and match[2]
    if match is None or inner not in _IN_LAYER:
        return None
    path, member = _IN_LAYER[inner]
    if expert:
        path = path.replace("mlp.", f"mlp.{_EXPERTS}{expert[1]}.")
    return f"decoder.layers.{match[1]}.{path}", member


def paths_here(model: nn.Module) -> dict[str, str]:
    """Return the paths in `model` by those in the whole model.

    `model` is a stage of it with some of the experts, and numbers its layers and experts from 0.
    """
    paths: dict[str, str] = {}
    for name, _ in model.named_modules():
        whole = name
        layer = _MEGATRON_LAYER.match(name)
        expert = _LOCAL_EXPERT.match(name)
        if expert:
            mixture: Any = model.get_submodule(expert[1])
            number = mixture.local_expert_indices[int(expert[2])]
            whole = f"{expert[1]}.{_EXPERTS}{number}{name[expert.end() :]}"
        if layer:
            holder: Any = model.get_submodule(layer[0])
            whole = f"decoder.layers.{holder.layer_number - 1}{whole[layer.end() :]}"  # counted from 1
        paths[whole] = name
    return paths


def trainable_shapes(
    reference: nn.Module,
    experts: Mapping[str, tuple[int, int]],
    exist: Callable[[Sequence[str]], Sequence[bool]],
    *,
    tied: bool,
) -> dict[str, tuple[int, int]]:
    """Return (out, in) of what can be trained: the linears of `reference`, layer by layer, then of `experts`.

    Args:
        reference: transformers' model, of which only the shapes count.
        exist: Tells for each path whether any rank has it.
        tied: Whether the head is also the embedding, and so cannot be trained.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear) and _place(name) and not (name == HEAD and tied):
            shapes[name] = (module.out_features, module.in_features)
    shapes |= {name: shape for name, shape in experts.items() if _place(name)}
    exists = exist([path for path, _ in filter(None, map(_place, shapes))])
    return {name: shape for (name, shape), is_there in zip(shapes.items(), exists, strict=True) if is_there}


def chosen(key: MountKey, shapes: Mapping[str, tuple[int, int]]) -> list[MegatronModule]:
    """Return the modules to wrap, in the order of the names.

    Raises AdapterRefused for what is not there.
    """
    if not key.adapter.modules:
        raise AdapterRefused("the adapter names no module", hint="set lora.target_modules")
    if unknown := [name for name in key.adapter.modules if name not in shapes]:
        offered = f"target_modules: {', '.join(dict.fromkeys(name.rpartition('.')[2] for name in shapes))}"
        if ".experts." not in unknown[0]:
            raise AdapterRefused(
                f"{unknown[0]} is not a linear that can be trained on Megatron here", hint=offered
            )
        raise AdapterRefused(
            f"{unknown[0]} is an expert that gets no adapter on Megatron here",
            hint="those of Qwen3-MoE get one with trainer.backend_args: {moe_grouped_gemm: false}; "
            f"{offered}",
        )
    by_path: dict[str, dict[str, str]] = {}
    for name in key.adapter.modules:
        path, member = _place(name) or ("", "")
        by_path.setdefault(path, {})[member] = name
    return [MegatronModule(path, members) for path, members in by_path.items()]


def members(target: MegatronModule) -> list[str]:
    """Return every member of a fused module, asked for or not; another module has one without a name."""
    suffix = re.sub(re.escape(_EXPERTS) + r"\d+\.", "", target.path.split(".", 3)[-1])
    return [member for path, member in _IN_LAYER.values() if path == suffix] or [""]
