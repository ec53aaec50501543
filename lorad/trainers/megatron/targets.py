"""Which of Megatron's modules a logical name is in, and what can be asked for: Megatron fuses q, k, v, and
gate, up.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Module of a Hugging Face layer -> module of a Megatron layer, and the member's name in Bridge's
`CanonicalLoRA`.
"""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MEGATRON_LAYER = re.compile(r"decoder\.layers\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Target:
    """One module of Megatron's that gets an adapter. members: Bridge's name of each member (empty for a
    module that is not fused) -> logical name; those that nobody asked for are left out.
    """

    path: str
    members: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def _place(logical: str) -> tuple[str, str] | None:
    """Return the path of the Megatron module and the member's name there."""
    if logical == HEAD:
        return "output_layer", ""
    found = _LAYER.fullmatch(logical)
    if found is None or found[2] not in _IN_LAYER:
        return None
    path, member = _IN_LAYER[found[2]]
    return f"decoder.layers.{found[1]}.{path}", member


def paths_here(model: nn.Module) -> dict[str, str]:
    """Path of a module in the whole model -> in `model`, a stage of it, which numbers its layers from 0."""
    found: dict[str, str] = {}
    for name, _ in model.named_modules():
        layer = _MEGATRON_LAYER.match(name)
        number: Any = model.get_submodule(layer[0]).layer_number if layer else 0  # from 1
        found[f"decoder.layers.{number - 1}{name[layer.end() :]}" if layer else name] = name
    return found


def those_here(targets: Iterable[Target], paths: Mapping[str, str]) -> list[Target]:
    """Return the targets that are on this stage, by their paths there."""
    return [replace(target, path=paths[target.path]) for target in targets if target.path in paths]


def trainable_shapes(
    reference: nn.Module, exist: Callable[[Sequence[str]], Sequence[bool]], *, tied: bool
) -> dict[str, tuple[int, int]]:
    """(out, in) of the linears of `reference` (transformers' model, of which only the shapes count) that can
    be trained, layer by layer. A head that is also the embedding is not one of them. exist: which of these
    paths any stage has.
    """
    found: dict[str, tuple[int, int]] = {}
    paths: list[str] = []
    for name, module in reference.named_modules():
        where = _place(name)
        if isinstance(module, nn.Linear) and where and not (name == HEAD and tied):
            found[name] = (module.out_features, module.in_features)
            paths.append(where[0])
    return {
        name: shape for (name, shape), is_there in zip(found.items(), exist(paths), strict=True) if is_there
    }


def chosen(key: MountKey, shapes: Mapping[str, tuple[int, int]], tp: int) -> list[Target]:
    """Return the modules to wrap, in the order of the names.

    Raises AdapterRefused for what is not there, or cannot be cut or fused.
    """
    _check_rank(key.adapter.rank, tp)
    _check_known(key.adapter.modules, shapes)
    by_path: dict[str, dict[str, str]] = {}
    for name in key.adapter.modules:
        path, member = _place(name) or ("", "")
        by_path.setdefault(path, {})[member] = name
    targets = [Target(path, members) for path, members in by_path.items()]
    if key.lora_type == "lora":
        for target in targets:
            _check_whole(target)
    return targets


def members(target: Target) -> list[str]:
    """Return every member of a fused module, asked for or not; of another module, one without a name."""
    suffix = target.path.split(".", 3)[-1]
    return [member for path, member in _IN_LAYER.values() if path == suffix] or [""]


def _check_rank(rank: int, tp: int) -> None:
    if rank % tp:
        upper = rank + tp - rank % tp
        raise AdapterRefused(
            f"lora.rank: {rank} cannot be cut over {tp} tensor-parallel ranks",
            hint=f"use rank {upper}" + (f" or {upper - tp}" if upper > tp else ""),
        )


def _check_known(modules: Iterable[str], shapes: Mapping[str, tuple[int, int]]) -> None:
    names = list(modules)
    unknown = [name for name in names if name not in shapes]
    if not names:
        raise AdapterRefused("the adapter names no module", hint="set lora.target_modules")
    if not unknown:
        return
    offered = dict.fromkeys(name.rpartition(".")[2] for name in shapes)
    kind = "an expert" if ".experts." in unknown[0] else "not a linear that can be trained on Megatron here"
    raise AdapterRefused(f"{unknown[0]} is {kind}", hint=f"target_modules: {', '.join(offered)}")


def _check_whole(target: Target) -> None:
    every = members(target)
    if len(target.members) < len(every):
        ends = {member: path.rpartition(".")[2] for path, (_, member) in _IN_LAYER.items()}
        first = next(iter(target.members.values()))
        raise AdapterRefused(
            f"{first}: with lora.type: lora, {', '.join(ends[member] for member in every)} share one A",
            hint="target all of them, or use lora.type: canonical_lora",
        )
