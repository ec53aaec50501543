"""Adapters on the experts of a mixture.

transformers has two tensors for a layer's experts, `gate_up_proj` [experts, 2 * inner, hidden] and
`down_proj` [experts, hidden, inner]. Each expert gets an A and a B for gate, up and down, held beside the
module, where FSDP does not see them. `_forward`, in the place of transformers' function for experts, adds
the pairs to the product, so that no weight changes or gets a gradient. (PEFT's `target_parameters` adds them
to the weights, which goes wrong when these are sharded.)
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lorad.adapters.adapter import AdapterConfig
from lorad.limits.arguments import ADAPTS, REPLAYS
from lorad.models.experts import Replay
from lorad.models.lora import EVEN_RANK
from lorad.models.products.forms import ends_of, grouped
from lorad.routes import RouteShape

_IMPLEMENTATION = "lorad"  # the function's name among transformers' own
_LINEARS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ".block_sparse_moe."
_OF_MIXTRAL = ("w1", "w3", "w2")  # its checkpoints have other names
_PLACE = "lorad_adapter"  # an attribute of the module: a `_Pairs`
_SEEN = "lorad_routes"  # another: a list of the routes that came by
_Routed = tuple[Tensor, Tensor, Tensor]


class _Pair(NamedTuple):
    """A linear of the experts with an adapter, in their order: a [n, rank, in] and b [n, out, rank]."""

    experts: tuple[int, ...]
    a: nn.Parameter
    b: nn.Parameter


class Part(NamedTuple):
    """The place of a stored weight: rows of an expert in the parameter `name`."""

    name: str
    expert: int
    rows: slice


@dataclass
class _Pairs:
    """What `_forward` adds to one layer's experts."""

    by_linear: dict[str, _Pair]
    scale: float
    dropout: float
    is_on: bool = True
    is_training: bool = False


def experts_in(layers: Sequence[nn.Module], model: Any) -> dict[str, Any]:
    """Find the modules of experts by their name in checkpoints, if `_forward` can compute all of them.

    Checkpoints must name their linears as `expert_shapes` does.
    """
    family = model.config.get_text_config().model_type
    if family not in ADAPTS["fsdp"]:
        return {}
    inside = {id(module) for layer in layers for module in layer.modules()}
    mixtures = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "down_proj", None), nn.Parameter) and hasattr(module, "num_experts")
    }
    for module in mixtures.values():
        # gate and up have to follow each other, with no biases and nothing behind the experts
        has_norm = getattr(module, "has_post_expert_norm", False)  # transformers 5.17 knows no such norm
        is_plain = (
            hasattr(module, "gate_up_proj")
            and getattr(module, "is_concatenated", False)
            and not (module.is_transposed or module.has_bias or has_norm)
        )
        if id(module) not in inside or not is_plain:
            return {}
    if family == "mixtral":
        return {name.replace(".mlp.", _MIXTRAL): module for name, module in mixtures.items()}
    return mixtures


def _linears_of(path: str) -> tuple[str, ...]:
    """Return the names in checkpoints of an expert's `_LINEARS`."""
    return _OF_MIXTRAL if _MIXTRAL in path else _LINEARS


def expert_shapes(modules: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each expert's linears by logical name, named as in checkpoints."""
    shapes = {}
    for path, module in modules.items():
        count, doubled, hidden = module.gate_up_proj.shape
        inner = doubled // 2
        for expert in range(count):
            for linear, name in zip(_LINEARS, _linears_of(path), strict=True):
                shape = (hidden, inner) if linear == "down_proj" else (inner, hidden)
                shapes[f"{path}.{expert}.{name}"] = shape
    return shapes


def parts_of(modules: Mapping[str, Any]) -> dict[str, Part]:
    """Return the place of each weight of an expert, by its name in checkpoints."""
    parts = {}
    for path, module in modules.items():
        inner = module.gate_up_proj.shape[1] // 2
        rows = {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner), "down_proj": slice(None)}
        for expert in range(module.num_experts):
            for linear, name in zip(_LINEARS, _linears_of(path), strict=True):
                fused = "down_proj" if linear == "down_proj" else "gate_up_proj"
                part = Part(f"{path.replace(_MIXTRAL, '.mlp.')}.{fused}", expert, rows[linear])
                parts[f"{path}.{expert}.{name}.weight"] = part
    return parts


def compute_experts(model: Any) -> None:
    """Let the model compute its experts with adapters, where they have any."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _forward)
    model.set_experts_implementation(_IMPLEMENTATION)


def put(
    modules: Mapping[str, Any], config: AdapterConfig, dtype: torch.dtype, device: torch.device
) -> dict[tuple[str, str], _Pair]:
    """Give the experts that `config` names pairs of zeros; return them by path of the experts and linear."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for path in modules:
        for name in config.modules:
            if name.startswith(f"{path}."):
                expert, linear = name.removeprefix(f"{path}.").split(".")
                numbers.setdefault((path, linear), []).append(int(expert))
    shapes = expert_shapes(modules)
    pairs = {}
    rank = config.rank_of_experts
    for (path, linear), experts in numbers.items():
        out, into = shapes[f"{path}.{experts[0]}.{linear}"]
        a, b = (
            nn.Parameter(torch.zeros(len(experts), *shape, dtype=dtype, device=device))
            for shape in ((rank, into), (out, rank))
        )
        pairs[path, linear] = _Pair(tuple(experts), a, b)
    for path, module in modules.items():
        names = dict(zip(_linears_of(path), _LINEARS, strict=True))
        mine = {names[linear]: pair for (its, linear), pair in pairs.items() if its == path}
        if mine:
            setattr(module, _PLACE, _Pairs(mine, config.scale_of_experts, config.dropout))
    return pairs


def take_out(modules: Mapping[str, Any]) -> None:
    for module in modules.values():
        module.__dict__.pop(_PLACE, None)


def switch(modules: Mapping[str, Any], *, is_on: bool, is_training: bool) -> None:
    """Set whether the adapters and their dropout act."""
    for module in modules.values():
        if (pairs := module.__dict__.get(_PLACE)) is not None:
            pairs.is_on = is_on
            pairs.is_training = is_training


@contextlib.contextmanager
def watched(modules: Mapping[str, Any]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the routes (int64 [tokens, per token]) that each module is given inside the block."""
    seen: dict[str, list[Tensor]] = {path: [] for path in modules}
    for path, module in modules.items():
        setattr(module, _SEEN, seen[path])
    try:
        yield seen
    finally:
        for module in modules.values():
            module.__dict__.pop(_SEEN)


class Router:
    """Replays routes in a model's routers, beside the experts, as `mlp.gate` beside `mlp.experts`."""

    def __init__(self, model: nn.Module, modules: Mapping[str, Any]) -> None:
        self.replay: Replay | None = None  # it stays until the next: a backward may recompute a layer
        self.tokens = 0  # of the replay, before padding
        for number, path in enumerate(modules):
            gate: Any = model.get_submodule(f"{path.rpartition('.')[0]}.gate")
            gate.register_forward_hook(partial(self._replayed, number))

    def _replayed(self, number: int, gate: Any, _: object, output: _Routed) -> _Routed | None:
        """Weigh the replay's experts as the router weighs its own.

        Its output is logits [tokens, experts], weights and experts [tokens, per token].
        """
        if self.replay is None:
            return None
        logits, _weights, own = output
        index = self.replay(number, None, own)
        weights = nn.functional.softmax(logits, dtype=torch.float, dim=-1).gather(1, index)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), index


def route_shape(model: Any, modules: Mapping[str, Any]) -> RouteShape | None:
    """Return the routes of a model; None where it is no mixture, or its routes cannot be replayed."""
    config = model.config.get_text_config()
    if not modules or config.model_type not in REPLAYS["fsdp"]:
        return None
    return RouteShape(len(modules), next(iter(modules.values())).num_experts, config.num_experts_per_tok)


def _forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [tokens, hidden].

    They are added in the order of `index`, int64 [tokens, per token], whatever else is in the batch.
    """
    if (seen := self.__dict__.get(_SEEN)) is not None:
        seen.append(index)
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = ends_of(flat, self.num_experts)
    rows = hidden.index_select(0, order // index.shape[1])
    pairs = self.__dict__.get(_PLACE)
    y = grouped(rows, self.gate_up_proj, ends)
    if pairs is not None and pairs.is_on:
        y = y + torch.cat([_added(rows, pairs, name, ends, y.shape[1] // 2) for name in _LINEARS[:2]], -1)
    inner = self._apply_gate(y.to(hidden.dtype))
    out = grouped(inner, self.down_proj, ends)
    if pairs is not None and pairs.is_on:
        out = out + _added(inner, pairs, "down_proj", ends, out.shape[1])
    home = torch.empty_like(order)
    home[order] = torch.arange(len(order), device=order.device)
    out = out.index_select(0, home).view(*index.shape, -1)
    total: Tensor = (out * weights.unsqueeze(-1)).sum(1)
    return total.to(hidden.dtype)


def _added(x: Tensor, pairs: _Pairs, linear: str, ends: Tensor, out: int) -> Tensor:
    """Return the adapters' share of a product, [rows, out], for x [rows, in] sorted by expert.

    The rows of each expert end at `ends`, int32 [experts].
    """
    if linear not in pairs.by_linear:
        return x.new_zeros(len(x), out)
    pair = pairs.by_linear[linear]
    a: Tensor = pair.a
    b: Tensor = pair.b
    if more := -a.shape[1] % EVEN_RANK:
        a = nn.functional.pad(a, (0, 0, 0, more))
        b = nn.functional.pad(b, (0, more))
    if len(pair.experts) < len(ends):
        index = torch.tensor(pair.experts, device=x.device)
        a, b = (half.new_zeros(len(ends), *half.shape[1:]).index_copy(0, index, half) for half in (a, b))
    dropped = nn.functional.dropout(x, pairs.dropout, pairs.is_training).to(a.dtype)
    low = nn.functional.grouped_mm(dropped, a.mT, offs=ends)
    return nn.functional.grouped_mm(low, b.mT, offs=ends) * pairs.scale
