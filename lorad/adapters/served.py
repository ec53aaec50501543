"""The form of an adapter that a server reads, which changes the base as the version does.

Servers read less than PEFT writes. SGLang knows no rsLoRA, and dies of an adapter on `k_proj`, `v_proj` or
`up_proj` alone, since it computes q, k and v in one product, and gate and up. It has one rank and one scale
for all modules of an adapter. vLLM takes adapters on the experts of a layer only all together.

Servers know some linears by the names of their parts: SGLang has `in_proj_q`, `in_proj_k` and `in_proj_v` for
`in_proj_qkv` of a gated delta net. An adapter on the parts, each with the A of the whole and its own rows of
B, makes the same change.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.targets import experts_of, leaf
from lorad.adapters.tensors import bfloat16_bits
from lorad.servers.kind import Parts

_Shapes = Mapping[str, tuple[int, int]]


def served(adapter: Adapter, shapes: _Shapes, joined: Sequence[Sequence[str]], dtype: str) -> Adapter:
    """Return an adapter cast, at the scale alpha / rank, with partners of a zero B where modules need them.

    Where any linear of an expert is adapted, all linears of all experts of its layer are. Where experts have
    a rank of their own, tensors of the lower rank are filled up with zeros, and the B of experts makes up for
    their other scale. An adapter of this form already is returned itself. DoRA has no such form: see
    `lorad/limits`.

    Args:
        shapes: (out, in) of every linear of the base.
        joined: Leaf names of linears that the server takes adapters on only together.
        dtype: The dtype of the server's arithmetic; tensors of bfloat16 are bits, see `bfloat16_bits`.
    """
    config = adapter.config
    partners = partners_of(config.modules, shapes, joined)
    if not (config.rslora or partners or config.expert_rank) and dtype == "float32":
        return adapter
    modules = tuple(sorted((*config.modules, *partners)))
    rank = config.max_rank
    scale = config.scale if len(config.experts) < len(config.modules) else config.scale_of_experts
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in adapter.tensors.items():
        is_a = ".lora_A." in name
        times = config.scale_of(name.rpartition(".lora_")[0]) / scale
        missing = rank - tensor.shape[0 if is_a else 1]
        tensors[name] = tensor
        if missing or not (is_a or times == 1):
            padded = np.pad(tensor, ((0, missing), (0, 0)) if is_a else ((0, 0), (0, missing)))
            padded *= np.float32(1 if is_a else times)
            padded.flags.writeable = False
            tensors[name] = padded
    for module in partners:
        out, width = shapes[module]
        pair = {"A": np.zeros((rank, width), np.float32), "B": np.zeros((out, rank), np.float32)}
        for part, zeros in pair.items():
            zeros.flags.writeable = False
            tensors[f"{module}.lora_{part}.weight"] = zeros
    for name, tensor in tensors.items() if dtype != "float32" else ():
        with np.errstate(over="ignore"):  # attestation finds what has become infinite
            cast = bfloat16_bits(tensor) if dtype == "bfloat16" else tensor.astype(np.float16)
        cast.flags.writeable = False
        tensors[name] = cast
    return Adapter(
        AdapterConfig(rank, scale * rank, modules, dropout=config.dropout),
        dict(sorted(tensors.items())),
    )


def divided(adapter: Adapter, shapes: _Shapes, parts: Mapping[str, Parts]) -> Adapter:
    """Return an adapter on the parts of linears, by leaf name: each has the A, and its own rows of the B."""
    config = adapter.config
    if not any(leaf(module) in parts for module in config.modules):
        return adapter
    tensors = {}
    for module in config.modules:
        parent, _, last = module.rpartition(".")
        a, b = (adapter.tensors[f"{module}.lora_{half}.weight"] for half in "AB")
        part = parts.get(last, Parts((last,)))
        last_rows = shapes[f"{parent}.{part.last}"][0] if part.last else len(b) // len(part.names)
        each = (len(b) - last_rows) // max(1, len(part.names) - 1)
        shares = np.split(b, [each * (number + 1) for number in range(len(part.names) - 1)])
        for name, share in zip(part.names, shares, strict=True):
            tensors[f"{parent}.{name}.lora_A.weight"] = a
            tensors[f"{parent}.{name}.lora_B.weight"] = share
    modules = tuple(sorted({name.rpartition(".lora_")[0] for name in tensors}))
    return Adapter(replace(config, modules=modules), dict(sorted(tensors.items())))


def partners_of(modules: Sequence[str], shapes: _Shapes, joined: Sequence[Sequence[str]]) -> list[str]:
    """Return the linears beside `modules` that need an adapter as well.

    `joined` has the linears of one part that a server adapts together. Experts take those of all their layer.
    """
    present = set(modules)
    partners = set[str]()
    for module in modules:
        parent, _, last = module.rpartition(".")
        for names in joined:
            if last in names:
                partners.update(f"{parent}.{name}" for name in names)
    if touched := {experts_of(module) for module in modules} - {""}:
        partners.update(name for name in shapes if experts_of(name) in touched)
    return sorted(name for name in partners - present if name in shapes)
