"""Routes: the experts that each token was sent to, in every layer that has experts, the highest score first.

As an array [tokens, layers, per token], uint8; uint16 where a layer has more than 255 experts. The largest
number of the dtype, which is no expert's, stands in all places of a token whose route is not known.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct


class RouteShape(Struct, frozen=True):
    """What the routes of a base are made of.

    layers: the layers that have experts.
    experts: how many experts a layer has.
    per_token: how many of them a token is sent to.
    """

    layers: int
    experts: int
    per_token: int

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        return np.dtype(np.uint8) if self.experts <= 255 else np.dtype(np.uint16)

    @property
    def bytes(self) -> int:
        """Return the bytes of one token's route."""
        return self.layers * self.per_token * self.dtype.itemsize

    def unknown(self, tokens: int) -> np.ndarray:
        """Return the routes of tokens of which nothing is known."""
        return np.full((tokens, self.layers, self.per_token), np.iinfo(self.dtype).max, self.dtype)

    def check(self, routes: np.ndarray) -> None:
        """Raise ValueError unless these are routes of this base."""
        if routes.dtype != self.dtype or routes.shape[1:] != (self.layers, self.per_token):
            raise ValueError(f"routes of {routes.dtype} {routes.shape[1:]} do not fit {self}")
        is_none = is_unknown(routes)
        if routes.size and (routes[~is_none] >= self.experts).any():
            raise ValueError(f"routes name an expert that is not among the {self.experts} of a layer")


class Routes(Struct, frozen=True):
    """The routes of a batch: prompts [sum(prompt_lengths), layers, per token], completions [T, …]."""

    prompts: np.ndarray
    completions: np.ndarray

    def part(self, prompts: slice | np.ndarray, completions: slice) -> Routes:
        """Return the routes of some of the tokens."""
        return Routes(self.prompts[prompts], self.completions[completions])


def is_unknown(routes: np.ndarray) -> np.ndarray:
    """Return for each token whether its route is unknown, as bool [tokens]."""
    unknown: np.ndarray = (routes == np.iinfo(routes.dtype).max).any((1, 2))
    return unknown


def unknown_like(routes: np.ndarray, tokens: int) -> np.ndarray:
    """Return the routes of tokens of which nothing is known, with the layers of `routes`."""
    return np.full((tokens, *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)


def continued(before: np.ndarray | None, now: np.ndarray) -> np.ndarray:
    """Return routes of tokens, the first of which were computed before: where known, that route counts."""
    if before is None:
        return now
    routes = now.copy()
    places = np.flatnonzero(~is_unknown(before))
    routes[places] = before[places]
    return routes
