"""Recording and replaying which experts tokens are sent to (R3, Rollout Routing Replay, Ma et al., 2025,
arXiv 2510.11370): a trainer that sends each token to the experts of the rollout differs from the engine by
rounding alone, where a router near a tie would send it elsewhere.

The experts are those of the rollout; their weights are the trainer's own scores of them, so that gradients
pass through the router.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lorad.models.base import Base
from lorad.routes import RouteShape

Routing = Callable[[int, Tensor | None, Tensor], Tensor]
"""From (number among the layers with experts, which of the tokens these are, None: all, the experts that the
router chose) to the experts that the tokens are sent to; int64 [tokens, per token], as the choice."""


def route_shape(base: Base) -> RouteShape | None:
    """None where the base is no mixture."""
    config = base.config.experts
    if config is None:
        return None
    layers = sum(layer.experts is not None for layer in base.layers)
    return RouteShape(layers, config.count, config.per_token)


class Recording:
    """Notes the routes of one forward pass, and changes none."""

    def __init__(self, shape: RouteShape) -> None:
        self._shape = shape
        self._layers: list[Tensor] = []

    def __call__(self, layer: int, rows: Tensor | None, own: Tensor) -> Tensor:
        assert rows is None and layer == len(self._layers)
        self._layers.append(own)
        return own

    def routes(self) -> np.ndarray:
        """Return the routes of the pass's flat tokens."""
        return torch.stack(self._layers, 1).cpu().numpy().astype(self._shape.dtype)


class Replay:
    """Sends the tokens of a forward pass where `routes` says, int32 [tokens, layers, per token]; those of
    which it has numbers below 0 go where the router sends them. Recomputing a layer changes nothing.
    """

    def __init__(self, routes: Tensor) -> None:
        self.routes = routes
        self.known = routes[:, 0, 0] >= 0
        self.differs = torch.zeros_like(self.known)
        """bool [tokens]: the router would have sent it to other experts, in any layer."""

    def __call__(self, layer: int, rows: Tensor | None, own: Tensor) -> Tensor:
        every = slice(None) if rows is None else rows
        given, known = self.routes[every, layer], self.known[every]
        is_other = (given.sort(-1).values != own.sort(-1).values).any(-1)
        self.differs[every] |= known & is_other
        return torch.where(known[:, None], given.to(own.dtype), own)

    def counts(self, tokens: slice = slice(None)) -> tuple[int, int, int]:
        """Return how many tokens were sent where `routes` says, how many of them the router would have sent
        elsewhere, and how many were sent by the router since nothing was known.
        """
        known = int(self.known[tokens].sum())
        return known, int(self.differs[tokens].sum()), self.known[tokens].numel() - known


def replayed(routes: np.ndarray, device: torch.device) -> Replay:
    """Return what replays an array of routes, see `lorad/routes.py`."""
    largest = np.iinfo(routes.dtype).max
    found = torch.from_numpy(routes.astype(np.int32)).to(device)
    return Replay(torch.where(found == largest, -1, found))
