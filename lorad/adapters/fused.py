"""PEFT's own form of adapters on experts.

transformers 5 has two parameters for a layer's experts, gate_up_proj and down_proj. target_parameters of PEFT
put a pair on each: lora_A [experts * rank, in], one expert after the other, and lora_B [out, rank * experts],
in which the experts lie beside each other for each of the ranks. The pair of gate_up_proj is
`….experts.base_layer` in a file and that of down_proj `….experts`; one without the other is `….experts`. Gate
and up with an A each are one pair of twice the rank, whose B has two blocks.
"""

from collections.abc import Iterable, Mapping
from math import isclose
from typing import Any

import numpy as np

from lorad.adapters.adapter import Adapter, Fused
from lorad.adapters.patterns import Pattern
from lorad.adapters.targets import EXPERTS, experts_of

_INNER = ".base_layer"
_PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MOST_EXPERTS = 1 << 17  # in all layers
_Arrays = Mapping[str, np.ndarray]
_Shape = tuple[int, ...]


def is_fused(module: str) -> bool:
    """Return whether a module of a file is a pair on all experts of a layer."""
    return module.removesuffix(_INNER).endswith(f".{EXPERTS}")


def pairs_of(
    shapes: Mapping[str, _Shape], settings: Mapping[str, Any], ranks: Pattern, alphas: Pattern
) -> list[Fused]:
    """Describe the pairs on experts among the tensors of a file with these settings of adapter_config.json.

    Raises ValueError that says what is wrong.
    """
    parameters = settings.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise ValueError("target_parameters is no list of names")
    modules = {_module(name) for name in shapes}
    pairs = []
    met = set[str]()
    for module in sorted(filter(is_fused, modules)):
        experts = module.removesuffix(_INNER)
        is_inner = module.endswith(_INNER)
        named = [name for name in _PARAMETERS if _any_names(parameters, f"{experts}.{name}")]
        both = {experts, f"{experts}{_INNER}"} <= modules
        if len(named) != 1 + both or (is_inner and not both):
            raise ValueError(f"target_parameters do not name what {module} is on")
        parameter = named[0] if is_inner or not both else named[1]
        met.add(f"{experts}.{parameter}")
        alpha = settings["lora_alpha"]
        rank = ranks.of(f"{experts}.{parameter}", settings["r"])
        its_alpha = alphas.of(f"{experts}.{parameter}", alpha)
        doubled = alpha * (2**0.5 if settings.get("use_rslora") else 2)
        owns = parameter == "gate_up_proj" and its_alpha != alpha and rank % 2 == 0
        if its_alpha != alpha and not (owns and isclose(its_alpha, doubled, rel_tol=1e-12)):
            raise ValueError(
                f"alpha_pattern gives {experts}.{parameter} {its_alpha} beside lora_alpha {alpha}"
            )
        a, b = (shapes[f"{module}.lora_{half}.weight"] for half in "AB")
        linears = _PARAMETERS[parameter]
        if len(a) != 2 or len(b) != 2 or 0 in (*a, *b) or rank < 1:
            raise ValueError(f"{module} has shapes {list(a)} and {list(b)}")
        if a[0] != b[1] or a[0] % rank or b[0] % len(linears):
            raise ValueError(f"{module} has shapes {list(a)} and {list(b)} for a rank of {rank}")
        pairs.append(Fused(module, experts, linears, a[0] // rank, rank // 2 if owns else rank, owns))
        if not both and a[1] == b[0]:
            raise ValueError(f"{module} is as wide as it is high: which way round cannot be told")
    if left := [entry for entry in parameters if not any(_any_names([entry], name) for name in met)]:
        raise ValueError(f"no tensor for {left[0]} of target_parameters")
    if sum(pair.total for pair in pairs) > _MOST_EXPERTS:
        raise ValueError(f"more than {_MOST_EXPERTS} experts are no adapter's")
    return pairs


def _any_names(entries: Iterable[str], name: str) -> bool:
    """Return whether any entry of target_parameters names a parameter, as PEFT compares them."""
    return any(name == entry or name.endswith(f".{entry}") for entry in entries)


def split_shapes(pair: Fused, shapes: Mapping[str, _Shape]) -> dict[str, _Shape]:
    """Return the shapes of the tensors of each expert, by logical name."""
    a, b = (shapes[f"{pair.module}.lora_{half}.weight"] for half in "AB")
    singles: dict[str, _Shape] = {}
    for expert in range(pair.total):
        for linear in pair.linears:
            name = pair.name(expert, linear)
            singles[f"{name}.lora_A.weight"] = (pair.rank, a[1])
            singles[f"{name}.lora_B.weight"] = (b[0] // len(pair.linears), pair.rank)
    return singles


def split(pair: Fused, tensors: _Arrays) -> dict[str, np.ndarray]:
    """Return the tensors of each expert, by logical name. Gate and up that share an A get a copy each.

    Raises ValueError where an A of gate is one of up too, though they should have their own.
    """
    a, b = (tensors[f"{pair.module}.lora_{half}.weight"] for half in "AB")
    a = a.reshape(pair.total, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, pair.total).transpose(2, 0, 1)
    out = b.shape[1] // len(pair.linears)
    parts = {}
    for number, linear in enumerate(pair.linears):
        rows = slice(number * out, (number + 1) * out)
        ranks = slice(None)
        if pair.owns:
            ranks = slice(number * pair.rank, (number + 1) * pair.rank)
            if np.delete(b[:, rows], np.r_[ranks], 2).any():
                raise ValueError(f"{pair.module}: gate and up use the same rows of lora_A at twice the rank")
        for expert in range(pair.total):
            halves = {"A": a[expert, ranks], "B": b[expert, rows, ranks]}
            for half, tensor in halves.items():
                contiguous = np.ascontiguousarray(tensor)
                contiguous.flags.writeable = False
                parts[f"{pair.name(expert, linear)}.lora_{half}.weight"] = contiguous
    return parts


def joined(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> tuple[_Arrays, dict[str, Any]]:
    """Return the tensors of a file in PEFT's form, and its settings.

    An expert without an adapter has zeros, in a layer with any. `shapes` has (out, in) of the base's linears.
    """
    config = adapter.config
    tensors = adapter.tensors
    layers = sorted({experts_of(module) for module in config.experts})
    of_linears = {name: tensor for name, tensor in tensors.items() if not experts_of(_module(name))}
    # gate and up have an A each unless it is the same in every expert
    gates = [name for name in shapes if experts_of(name) in layers and name.endswith(".gate_proj")]
    pairs = [(f"{gate}.lora_A.weight", f"{gate[:-9]}up_proj.lora_A.weight") for gate in gates]
    owns = not all(
        gate in tensors and up in tensors and np.array_equal(tensors[gate], tensors[up]) for gate, up in pairs
    )
    for layer in layers:
        count = len({name for name in shapes if experts_of(name) == layer}) // 3
        for parameter, linears in _PARAMETERS.items():
            module = layer + (_INNER if parameter == "gate_up_proj" else "")
            stacks = [_stack(adapter, layer, linear, count, shapes) for linear in linears]
            a, b = stacks[0]
            if len(stacks) == 2:
                _, rows, ranks = b.shape
                other_a, other_b = stacks[1]
                blocks = np.zeros((count, 2 * rows, (1 + owns) * ranks), np.float32)
                blocks[:, :rows, :ranks] = b
                blocks[:, rows:, -ranks:] = other_b
                a = np.concatenate([a, other_a], 1) if owns else a
                b = blocks
            of_linears[f"{module}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, a.shape[-1]))
            of_linears[f"{module}.lora_B.weight"] = np.ascontiguousarray(
                b.transpose(1, 2, 0).reshape(b.shape[1], -1)
            )
    if not layers:
        return of_linears, {}
    rank = config.rank_of_experts
    settings = {
        "target_parameters": [f"{layer}.{parameter}" for layer in layers for parameter in _PARAMETERS],
        "rank_pattern": {r"experts\.gate_up_proj": (1 + owns) * rank, r"experts\.down_proj": rank},
        "alpha_pattern": {},
        "lora_dropout": 0.0,  # PEFT takes no other on parameters; where nothing is trained it is none
    }
    if owns:
        factor = 2**0.5 if config.rslora else 2
        settings["alpha_pattern"] = {r"experts\.gate_up_proj": config.alpha * factor}
    return of_linears, settings


def _module(name: str) -> str:
    return name.rpartition(".lora_")[0]


def _stack(
    adapter: Adapter, layer: str, linear: str, count: int, shapes: Mapping[str, tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return A [experts, rank, in] and B [experts, out, rank] of one linear."""
    rank = adapter.config.rank_of_experts
    out, into = shapes[f"{layer}.0.{linear}"]
    a = np.zeros((count, rank, into), np.float32)
    b = np.zeros((count, out, rank), np.float32)
    for expert in range(count):
        name = f"{layer}.{expert}.{linear}"
        if f"{name}.lora_A.weight" in adapter.tensors:
            a[expert], b[expert] = (adapter.tensors[f"{name}.lora_{half}.weight"] for half in "AB")
    return a, b
