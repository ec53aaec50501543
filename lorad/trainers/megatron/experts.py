"""The experts of a mixture, which Megatron spreads over expert-parallel ranks, and their adapters' tensors.

Bridge's export counts the experts of each rank from 0, so that all but those of the first rank are lost.
lorad gathers them itself.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lorad.limits.arguments import ADAPTS
from lorad.models.facts import read_facts

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)")
_Shapes = Mapping[str, tuple[int, int]]


def expert_linears(model: Path, config: Any) -> _Shapes:
    """Return (out, in) of the experts' linears by logical name; empty for families that were not tried."""
    return read_facts(model).experts if config.model_type in ADAPTS["megatron"] else {}


@contextlib.contextmanager
def watched(mixtures: Sequence[Any]) -> Iterator[dict[int, Tensor]]:
    """Collect the routes inside the block: bool [tokens, experts] by the layer's number, from 0."""
    seen: dict[int, Tensor] = {}

    def note(number: int, router: Any, inputs: Any, outputs: Any) -> None:
        seen[number] = outputs[1]

    hooks = [layer.router.register_forward_hook(partial(note, layer.layer_number - 1)) for layer in mixtures]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def are_met(experts: Iterable[str], met: Mapping[int, Tensor]) -> list[bool]:
    """Return for each expert whether `met` (bool [experts] by layer) has it."""
    counts = {layer: each.tolist() for layer, each in met.items()}
    places = [_EXPERT.fullmatch(name) for name in experts]
    return [
        bool(place and int(place[1]) in counts and counts[int(place[1])][int(place[2])]) for place in places
    ]


def from_all_ranks(
    shapes: Mapping[str, tuple[int, ...]],
    own: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the tensors of all ranks of `group` by name, fp32 on the CPU. Collective.

    The bits of all ranks are added up; a tensor is zero on all ranks but one. `own` has this rank's tensors.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    flat = torch.zeros(sum(sizes), device=device)
    for name, part in zip(shapes, flat.split(sizes), strict=True):
        if name in own:
            part.view(shapes[name]).copy_(own[name])
    dist.all_reduce(flat.view(torch.int32), group=group)
    return {name: part.view(shapes[name]) for name, part in zip(shapes, flat.cpu().split(sizes), strict=True)}
