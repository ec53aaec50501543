"""One adapter on one rank: flat fp32 vectors of this rank's part, and the optimizer over them.

Weights and gradients are on every data-parallel rank; Adam's moments are cut over these, each rank steps its
share and the shares are joined: ZeRO stage 1 (Rajbhandari et al., 2020, arXiv 1910.02054), Megatron's
distributed optimizer.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorad.protocol.batch import Optimizer
from lorad.trainers.base import SlotSpec
from lorad.trainers.checkpoint import Saved, later_seed
from lorad.trainers.sharded.workers import DataParallel
from lorad.trainers.slot_math import Spans, adamw, l2_norm, spans_of

_VECTORS = ("weights", "grads", "exp_avg", "exp_avg_sq")
HOST = torch.device("cpu")


class ParameterSection(NamedTuple):
    """Parameters of a slot that the same ranks hold."""

    shapes: Sequence[torch.Size]
    dp: DataParallel
    counts: bool = True  # in sums over all ranks, where ranks outside of `dp` hold the same
    times: int = 1  # how often each token is in their gradients, summed over `dp`
    are_b: Sequence[bool] = ()  # whether each parameter is a B; empty: none

    @property
    def size(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    @property
    def padded(self) -> int:
        return -(-self.size // self.dp.size) * self.dp.size

    @property
    def spans(self) -> Spans:
        """Return the runs of A and B in this rank's share."""
        share = self.padded // self.dp.size
        are_b = self.are_b or [False] * len(self.shapes)
        sizes = [(shape.numel(), is_b) for shape, is_b in zip(self.shapes, are_b, strict=True)]
        return spans_of(
            [*sizes, (self.padded - self.size, False)], share * self.dp.rank, share * (self.dp.rank + 1)
        )


class ShardedSlot:
    """One adapter, whose vectors on `device` have one section after another.

    A frozen adapter has weights alone: its other vectors are on the meta device, where they take no memory.

    Args:
        dp: The ranks with other samples.
        sections: This rank's parameters in their order, see `Mounted`.
        head: The shapes of a critic's head, which every rank holds whole; they come after the sections.
        leads: See `Body`.
    """

    def __init__(
        self,
        spec: SlotSpec,
        dp: DataParallel,
        sections: Sequence[ParameterSection],
        head: Sequence[torch.Size] = (),
        *,
        leads: bool = True,
    ) -> None:
        self.spec = spec
        self.dp = dp
        self._sections = [each for each in (*sections, ParameterSection(head, dp, leads)) if each.shapes]
        self.head = [nn.Parameter(torch.zeros(shape)) for shape in head]
        self._sizes = [each.padded for each in self._sections]
        self._share_sizes = [each.padded // each.dp.size for each in self._sections]
        others = torch.device("meta") if spec.frozen else HOST
        self.weights = torch.zeros(sum(self._sizes))
        self.grads = torch.zeros(sum(self._sizes), device=others)
        self.exp_avg, self.exp_avg_sq = (torch.zeros(sum(self._share_sizes), device=others) for _ in range(2))
        self.step = 0
        self.tokens_per_microbatch = spec.tokens_per_microbatch
        self.seed = spec.seed
        self.draws = 0

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def move(self, device: torch.device) -> None:
        """Move all vectors to a device or to (pinned) host memory, away from any views of them."""
        if device == self.device:
            return
        for name in _VECTORS:
            vector = getattr(self, name)
            if vector.is_meta:
                continue
            pins = device.type == "cpu" and vector.is_cuda
            setattr(self, name, torch.empty(vector.shape, device=device, pin_memory=pins).copy_(vector))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a vector as parameters, sharing its memory."""
        views: list[Tensor] = []
        for section, mine in zip(self._sections, flat.split(self._sizes), strict=True):
            parts = mine[: section.size].split([shape.numel() for shape in section.shapes])
            views += [part.view(shape) for part, shape in zip(parts, section.shapes, strict=True)]
        return views

    def bind(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have parameters of fp32, including the head, share the slot's memory, and fill others from it."""
        for parameter, weight, grad in zip(
            [*parameters, *self.head], self.views(self.weights), self.views(self.grads), strict=True
        ):
            if parameter.dtype == torch.float32:
                parameter.data = weight
                parameter.grad = None if grad.is_meta else grad
            else:
                parameter.data.copy_(weight)
                parameter.grad = None

    def collect(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add gradients that did not go into the slot's own memory, in fp32."""
        for parameter, grad in zip([*parameters, *self.head], self.views(self.grads), strict=True):
            elsewhere = parameter.grad
            if elsewhere is not None and elsewhere.data_ptr() != grad.data_ptr():
                grad.add_(elsewhere)
                parameter.grad = grad if parameter.dtype == torch.float32 else None

    def let_go(self, parameters: Sequence[nn.Parameter]) -> None:
        """Stop sharing memory with the parameters, which keep their shapes."""
        for parameter in (*parameters, *self.head):
            parameter.grad = None
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    def values(self, states: Tensor) -> Tensor:
        """Return the head's values of states [T, hidden], [T] in fp32. The slot has to be bound."""
        weight, bias = self.head
        return nn.functional.linear(states.float(), weight, bias)[:, 0]

    def draw(self, row: int) -> None:
        """Seed dropout for a micro-batch of the present call."""
        text = f"dropout {self.seed} {self.draws} {self.dp.rank} {row}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)

    def fill(self, flat: Tensor, parts: Sequence[Tensor]) -> None:
        """Overwrite a vector, or this rank's share of one, with values shaped as the parameters."""
        whole = flat if flat.numel() == self.weights.numel() else torch.zeros_like(self.weights)
        for view, part in zip(self.views(whole), parts, strict=True):
            view.copy_(part)
        if whole is not flat:
            for section, theirs, mine in self._by_section(whole, flat):
                mine.copy_(section.dp.part(theirs))

    def whole(self, part: Tensor) -> list[Tensor]:
        """Return a moment of all data-parallel ranks, as parameters. Collective."""
        if part.numel() == self.weights.numel():
            return self.views(part)
        flat = torch.empty_like(self.weights)
        for section, theirs, mine in self._by_section(flat, part):
            if section.dp.size == 1:
                theirs.copy_(mine)
            section.dp.join_parts(mine, theirs)
        return self.views(flat)

    def _by_section(self, flat: Tensor, part: Tensor) -> list[tuple[ParameterSection, Tensor, Tensor]]:
        """Return each section with its views of a vector and of this rank's share of one."""
        return list(zip(self._sections, flat.split(self._sizes), part.split(self._share_sizes), strict=True))

    def set_rng(self, saved: Saved) -> None:
        """Restore dropout's state, or derive it from seed and step after another kind of trainer."""
        if "draws" in saved.rng:
            self.seed, self.draws = (int(number) for number in saved.rng["draws"])
        else:
            self.seed = later_seed(self.spec.seed, saved.step)
            self.draws = 0

    def rng(self) -> dict[str, np.ndarray]:
        return {"draws": np.array([self.seed, self.draws], np.int64)}

    def optim_step(
        self, lr: float, max_grad_norm: float, optimizer: Optimizer | None = None
    ) -> tuple[float, bool]:
        """Take a step, with `optimizer` in the place of the slot's settings, and clear the gradients.

        Return the norm before clipping and whether the step was applied. Collective over all ranks.
        """
        grads = []
        for section, mine in zip(self._sections, self.grads.split(self._sizes), strict=True):
            grads.append(section.dp.reduced_part(mine))
            if section.times > 1:
                grads[-1].div_(section.times)
        # the norm is of the whole adapter, of which each rank has its own share, and of the head
        if dist.get_world_size() == 1 == len(grads):
            norm = l2_norm(grads[0])
        else:
            of_this_rank = sum(
                l2_norm(grad) ** 2
                for section, grad in zip(self._sections, grads, strict=True)
                if section.counts
            )
            total = torch.tensor([of_this_rank], dtype=torch.float64, device=self.device)
            if dist.get_world_size() > 1:
                dist.all_reduce(total)
            norm = math.sqrt(total.item())
        applied = bool(np.isfinite(norm))
        if applied:
            self.step += 1
            settings = optimizer or self.spec.optimizer
            weights = self.weights.split(self._sizes)
            averages = self.exp_avg.split(self._share_sizes)
            squares = self.exp_avg_sq.split(self._share_sizes)
            of_sections = zip(self._sections, grads, weights, averages, squares, strict=True)
            for section, grad, whole, average, square in of_sections:
                if 0 < max_grad_norm < norm:
                    grad.mul_(max_grad_norm / norm)
                mine = section.dp.part(whole)
                adamw(mine, grad, average, square, self.step, lr, settings, section.spans)
                section.dp.join_parts(mine, whole)
        self.grads.zero_()
        return norm, applied
