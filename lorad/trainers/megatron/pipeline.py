"""The stages of a pipeline: hidden states go up from stage to stage, their gradients come down.

One micro-batch is under way at a time, so all stages but one wait: memory is shared out, not time.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lorad.trainers.sharded.head import Differentiating

Run = Callable[[Tensor | None], Tensor]
"""Runs this stage's layers on the hidden states of the stage below, None on the first stage."""


class Pipeline:
    """This rank's stage. All stages work on the same rows, and pass on states of `dtype`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        from megatron.core import parallel_state

        self._group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        self.whole: dist.ProcessGroup = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        """Ranks that have all stages and all experts between them."""
        self._device = device
        self._dtype = dtype
        self.rank: int = parallel_state.get_pipeline_model_parallel_rank()
        self.size: int = parallel_state.get_pipeline_model_parallel_world_size()
        self._is_last = self.rank == self.size - 1
        self.first_trained = 0  # the lowest stage with an adapter; no stage below needs a gradient

    def anywhere(self, own: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether it is true on some stage, with some experts. Collective."""
        flags = torch.tensor(own, dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.whole)
        return [bool(flag) for flag in flags.tolist()]

    def least(self, number: int) -> int:
        """Return the minimum of the stages' numbers, whatever experts their ranks have. Collective."""
        smallest = torch.tensor([number], device=self._device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self.whole)
        return int(smallest.item())

    def on_any_stage(self, flags: Tensor) -> Tensor:
        """Return which of the flags, bool, are true on some stage. Collective over the stages."""
        counts = flags.to(torch.int32)
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=self._group)
        return counts > 0

    def forward(self, run: Run, hidden: Sequence[int], figures: Tensor) -> None:
        """Run the stages without a graph, which pass on states of this shape.

        figures: The last stage's visit fills them; every stage has them afterwards.
        """
        with torch.no_grad():
            self._passed_on(run(self._from_below(hidden)), figures)

    def backward(self, run: Run, hidden: Sequence[int], visit: Differentiating) -> None:
        """Run forward and backward. The last stage makes the visit, whose figures all stages get."""
        below = self._from_below(hidden)
        trains = self.rank >= self.first_trained
        asks = self.rank > self.first_trained
        if below is not None:
            below.requires_grad_(asks)
        with torch.set_grad_enabled(trains):
            states = run(below)
        self._passed_on(states.detach(), visit.figures)
        gradient = visit.gradient
        if trains and not self._is_last:
            gradient = self._receive(hidden, self.rank + 1).to(states.dtype)
        if states.requires_grad:
            states.backward(gradient)
        if below is not None and asks:
            self._send(below.grad, self.rank - 1)

    def _passed_on(self, states: Tensor, figures: Tensor) -> None:
        """Send hidden states to the next stage, and the figures of the last one to all."""
        if not self._is_last:
            self._send(states, self.rank + 1)
        if figures.numel():
            dist.broadcast(figures, self._place(self.size - 1), group=self._group)

    def _from_below(self, shape: Sequence[int]) -> Tensor | None:
        return self._receive(shape, self.rank - 1) if self.rank else None

    def _receive(self, shape: Sequence[int], stage: int) -> Tensor:
        received = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        dist.recv(received, self._place(stage), group=self._group)
        return received

    def _send(self, tensor: Tensor | None, stage: int) -> None:
        assert tensor is not None
        dist.send(tensor.to(self._dtype).contiguous(), self._place(stage), group=self._group)

    def _place(self, stage: int) -> int:
        return dist.get_global_rank(self._group, stage)
