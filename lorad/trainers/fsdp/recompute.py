"""Activations that the backward computes again, layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Recompute:
    """A switch for a model's layers. transformers' own acts in training mode alone, where a base's dropout
    acts too.
    """

    on: bool = False

    def install(self, layers: Iterable[nn.Module]) -> None:
        """Before `fully_shard`: its hooks, which gather a layer's weights, stay outside and run once."""
        for layer in layers:
            layer.forward = self._switched(layer.forward)

    def _switched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return run
