"""Which experts of the base a batch meets."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lorad.models.attention import CausalAttention
from lorad.models.base import Base, Weight
from lorad.models.decoder import Ends, Last, hidden
from lorad.models.lora import RoutedLora, members
from lorad.models.products.forms import grouped


class _Noted:
    """An adapter that changes nothing, and notes the experts that are asked for what it adds."""

    def __init__(self) -> None:
        self.met: set[tuple[int, str]] = set()  # (layer, `experts.3`)

    def apply(self, layer: int, group: str, x: Tensor, y: Tensor) -> Tensor:
        return y

    def reaches(self, layer: int, group: str) -> bool:
        return True

    def has_experts(self, layer: int) -> bool:
        return True

    def routed(self, layer: int, tokens: Tensor, ends: Tensor) -> RoutedLora:
        places = [0, *ends.tolist()]
        met = (expert for expert, (begin, end) in enumerate(pairwise(places)) if end > begin)
        self.met |= {(layer, f"experts.{expert}") for expert in met}
        return _Nothing()


class _Nothing:
    def product(self, linear: str, x: Tensor, weights: Weight, ends: Tensor) -> Tensor:
        return grouped(x, weights, ends)


@torch.no_grad()
def experts_met(base: Base, prompt: np.ndarray, completion: np.ndarray) -> set[tuple[int, str]]:
    """Return the (layer, `experts.3`) of which the log-probabilities of a completion depend."""
    noted = _Noted()
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64)).to(base.device)
    places = torch.arange(len(ids), device=base.device)
    predicting = Last(places[len(prompt) - 1 : -1], noted)
    hidden(base, ids[None], places, CausalAttention(), noted, ends=Ends(last=predicting))
    return noted.met


def unmet(base: Base, met: set[tuple[int, str]]) -> list[str]:
    """Return the names of the other experts, as `model.layers.4.mlp.experts.17`, layer by layer."""
    count = 0 if base.config.experts is None else base.config.experts.count
    return [
        members(base, layer, f"experts.{expert}.down")[0].rpartition(".")[0]
        for layer in filter(base.config.has_experts, range(len(base.layers)))
        for expert in range(count)
        if (layer, f"experts.{expert}") not in met
    ]
