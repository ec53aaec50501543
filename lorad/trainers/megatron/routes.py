"""Routes replayed in Megatron's routers, see `lorad/models/experts.py`."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from lorad.limits.arguments import REPLAYS
from lorad.models.experts import Replay, replayed
from lorad.routes import RouteShape, unknown_like
from lorad.trainers.megatron.pipeline import Pipeline
from lorad.trainers.megatron.provider import Base
from lorad.trainers.sharded.rows import Rows


class RouteReplay:
    """Sends tokens where `Rows.routes` says, in the layers of this rank.

    Megatron asks an object of its class `RouterReplay` for the experts, where a router has one, and weighs
    them itself. lorad puts its own there: Megatron's knows no tokens without a route, and takes a
    recomputation's routes from a queue, in the order of the forwards.

    The `mixtures` are this rank's `MoELayer`s. Collective.
    """

    def __init__(self, base: Base, mixtures: Sequence[Any], pipeline: Pipeline, tp: int) -> None:
        self._pipeline = pipeline
        self._tp = tp
        self._replay: Replay | None = None
        self._tokens = 0
        own = {layer.layer_number - 1 for layer in mixtures}
        every = pipeline.anywhere([number in own for number in range(base.config.num_hidden_layers)])
        layers = [number for number, has_experts in enumerate(every) if has_experts]
        self.shape: RouteShape | None = None
        if not layers or base.config.model_type not in REPLAYS["megatron"]:
            return
        config: Any = base.model.config
        self.shape = RouteShape(len(layers), config.num_moe_experts, config.moe_router_topk)
        for layer in mixtures:
            choose = partial(self._choose, layers.index(layer.layer_number - 1))
            layer.router.router_replay = SimpleNamespace(get_replay_topk=choose)

    def begin(self, rows: Rows) -> None:
        """Replay these routes until the next call: a backward may recompute layers."""
        self._replay = None
        self._tokens = rows.ids.shape[1]
        if rows.routes is not None:
            padding = unknown_like(rows.routes, -self._tokens % self._tp)
            self._replay = replayed(np.concatenate([rows.routes, padding]), rows.ids.device)

    def counts(self) -> tuple[int, int, int]:
        """Return `Replay.counts` over the layers of all stages. Collective over the stages."""
        if self._replay is None:
            return 0, 0, 0
        self._replay.differs = self._pipeline.on_any_stage(self._replay.differs)
        return self._replay.counts(slice(self._tokens))

    def _choose(
        self,
        number: int,
        scores: Tensor,
        topk: int,
        groups: int | None,
        group_topk: int | None,
        best: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return each token's scores and experts, [tokens, topk]; `best` is Megatron's own choice of both."""
        weights, own = best(scores, topk, groups, group_topk)
        if self._replay is None:
            return weights, own
        index = self._replay(number, None, own)
        return scores.gather(1, index), index
