"""A base model spread over the ranks of one trainer, with room for one adapter: what a backend brings.

Everything else (slots, micro-batches, losses, AdamW, files) is the same for all of them and stands in this
package. Every rank makes the same calls in the same order: most of them talk to the other ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct, structs
from torch import Tensor, nn

from lorad.adapters.adapter import AdapterConfig
from lorad.limits.limit import BackendSetup
from lorad.models.facts import read_facts
from lorad.protocol.pool_setup import Quantize
from lorad.rl.loss import TokenLogprobs
from lorad.routes import RouteShape
from lorad.trainers.base import LoraType
from lorad.trainers.sharded.head import Differentiating, RowLoss, ScoringVisit, Visit, likely_of
from lorad.trainers.sharded.rows import Rows
from lorad.trainers.sharded.workers import DataParallel


class BodySettings(Struct, frozen=True, kw_only=True):
    """What a rank's body is made of."""

    model: str
    dtype: Literal["float32", "bfloat16"]  # of the base and its arithmetic
    device: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    args: dict[str, object] = {}  # the spec's `trainer.backend_args`, as they are
    quantize: Quantize | None = None  # the format to whose grid the base's linears are rounded
    whole: bool = False  # whether the base of a single rank stays in one piece, for an engine that shares it

    def backend_setup(self, trainer: str) -> BackendSetup:
        """Return the setup of this trainer that limits are checked by; call it in a rank."""
        fields = structs.asdict(self)
        del fields["whole"]
        return BackendSetup(
            trainer=trainer,
            dp=max(1, dist.get_world_size() // (self.tp * self.pp * self.cp)),
            **{**fields, "model": read_facts(Path(self.model))},
        )


class MountKey(Struct, frozen=True):
    """Adapters with equal keys differ in their numbers alone."""

    adapter: AdapterConfig
    lora_type: LoraType = "canonical_lora"


class Mounted(ABC):
    """The modules of one adapter inside the model.

    Its parameters are plain tensors on every rank (no DTensor).
    """

    parameters: Sequence[nn.Parameter]
    """This rank's trainable parameters, always in the same order. Ranks of one data-parallel group hold the
    same numbers, other ranks parts of their own; nobody but lorad synchronises them or their gradients.
    """
    are_b: Sequence[bool]
    """Whether each parameter is a B."""
    of_experts: int = 0
    """How many parameters, the last ones, belong to experts that the ranks of `Body.expert_dp` hold alike."""

    @abstractmethod
    def gather(self, local: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return whole fp32 tensors on the CPU, the same on every rank, from this rank's parts. Collective.

        Names are as in `Adapter`, for exactly the modules of the configuration. `local` is shaped as the
        parameters; moments do as well.
        """

    @abstractmethod
    def scatter(self, logical: Mapping[str, np.ndarray]) -> list[Tensor]:
        """Return this rank's parts, fp32 on the CPU: `gather` backwards. Not collective.

        Raises AdapterRefused where logical tensors that share one parameter here are not equal.
        """


class Body(ABC):
    """Made once in each rank, after `torch.distributed` is ready (see `workers.join`)."""

    setup: BackendSetup
    """What was asked for; limits are checked by it."""
    dp: DataParallel
    expert_dp: DataParallel = DataParallel()
    """The ranks that hold the same experts, where that is not `dp`: see `Mounted.of_experts`."""
    cp: DataParallel = DataParallel()
    """The ranks among `dp` that read the same rows, a part of the tokens each."""
    expert_times: int = 1
    """How many ranks of `expert_dp` send the tokens of the same samples to the experts."""
    device: torch.device
    dtype: torch.dtype
    lockstep: bool
    """Whether a forward is collective over data-parallel ranks, so that all must do equally many."""
    fuses: bool = False
    """Whether linears share an A with `lora_type: lora`, as Megatron's do."""
    leads: bool = True
    """Whether this rank counts what all model-parallel ranks hold alike, in sums over all ranks."""
    has_states: bool = True
    """Whether `states` works, which critics need."""
    may_forget: bool = False
    """Whether `forget` works and may be needed: on a GPU (a CPU without memory ends the process), and where
    passes wait for no other rank. It is the same on all ranks.
    """
    shapes: Mapping[str, tuple[int, int]]
    """(out, in) of every linear that an adapter may target, by logical name."""
    experts: Sequence[str] | None = None
    """The names of all experts, as `model.layers.4.mlp.experts.17`; None where `met` does not work."""
    routes: RouteShape | None = None
    """The routes of the base, where `states` sends tokens to the experts of `Rows.routes`."""
    vocab: int
    hidden: int
    """The width of the last hidden state."""
    max_tokens: int
    """The longest sequence."""
    parameter_count: int
    """The number of parameters of the whole base."""
    packs: bool = True
    """Whether several sequences may share a row of `Rows`; else each has a row of its own."""

    def forget(self) -> None:
        """Forget a forward or backward that an exception ended, so that the next can begin."""
        raise NotImplementedError

    @abstractmethod
    def checksum(self) -> str:
        """Return the sha256 (hex) over this rank's weights of the base as they are now, without adapters."""

    @abstractmethod
    def mount(self, key: MountKey) -> Mounted:
        """Put fresh adapter modules into the model, in place of any others; their numbers mean nothing yet.

        Raises AdapterRefused, and leaves the model with none, for what cannot be trained here.
        """

    def row_norms(self, modules: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the length of each row of the weights of some linears, [out] in fp32. Collective."""
        raise NotImplementedError("this body has no DoRA")

    @abstractmethod
    def unmount(self) -> None:
        """Take the adapter modules out of the model."""

    @abstractmethod
    def states(
        self, rows: Rows, *, adapter: bool, train: bool, recompute: bool, visit: Visit | None = None
    ) -> Tensor:
        """Return the last hidden states, after the last norm, that predict the micro-batch's targets.

        They are [M, hidden], and the same on every rank that works on these rows.

        Args:
            adapter: Whether the adapter acts; without it there is the base alone.
            train: Whether dropout acts.
            recompute: Whether activations are recomputed in the backward.
            visit: Called once amid the forward, with these states and the output layer, whose weights are
                gathered once for all that it computes. Without it no logits are made.
        """

    def replayed(self) -> tuple[int, int, int]:
        """Return the `Replay.counts` of the last `states`; zeros where it had no routes."""
        return 0, 0, 0

    def met(self, rows: Rows) -> Tensor:
        """Return whether the scores that predict the targets depend on each of `experts`, bool [experts]."""
        raise NotImplementedError("this body does not know its routes")

    def likely(self, rows: Rows, temperature: float, *, adapter: bool) -> TokenLogprobs:
        """Return the log-probabilities of the targets, [M], without a gradient and with dropout off.

        They are the same on every rank that works on these rows.
        """
        scoring = ScoringVisit(rows.targets, temperature)
        with torch.no_grad():
            self.states(rows, adapter=adapter, train=False, recompute=False, visit=scoring)
        return likely_of(scoring.figures)

    def backward(self, rows: Rows, loss: RowLoss, *, recompute: bool) -> None:
        """Add the gradient of the loss to the `.grad` of the mounted parameters.

        It runs also without targets: other ranks' backward may need this rank's part of the graph.
        """
        visit = Differentiating(rows.targets, loss)
        states = self.states(rows, adapter=True, train=True, recompute=recompute, visit=visit)
        if states.requires_grad:
            states.backward(visit.gradient)
        loss.note(likely_of(visit.figures))

    @abstractmethod
    def offload(self) -> None:
        """Move the base to host memory."""

    @abstractmethod
    def onload(self) -> None: ...
