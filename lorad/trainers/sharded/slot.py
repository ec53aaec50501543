"""One adapter on one rank: flat fp32 vectors of this rank's part, and the optimizer over them.

Weights and gradients are on every data-parallel rank; Adam's moments are cut over these, each rank steps its
share and the shares are joined: ZeRO stage 1 (Rajbhandari et al., 2020, arXiv 1910.02054), Megatron's
distributed optimizer.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorad.protocol.batch import Optimizer
from lorad.trainers.base import SlotSpec
from lorad.trainers.checkpoint import Saved, later_seed
from lorad.trainers.sharded.workers import DataParallel
from lorad.trainers.slot_math import adamw, l2_norm

_VECTORS = ("weights", "grads", "exp_avg", "exp_avg_sq")
HOST = torch.device("cpu")


class Slot:
    """shapes: of this rank's parameters, see `Mounted`. head: of a critic's, which every rank holds whole and
    which come after the others. leads: see `Body`. Its vectors are where `device` says; all but the weights
    of a frozen one are on the meta device, where they take no memory.
    """

    def __init__(
        self,
        spec: SlotSpec,
        shapes: Sequence[torch.Size],
        dp: DataParallel,
        head: Sequence[torch.Size] = (),
        *,
        leads: bool = True,
    ) -> None:
        self.spec, self.shapes, self.dp = spec, [*shapes, *head], dp
        self.head = [nn.Parameter(torch.zeros(shape)) for shape in head]
        self.size = sum(shape.numel() for shape in self.shapes)
        self._counted = self.size if leads else sum(shape.numel() for shape in shapes)
        padded = -(-self.size // dp.size) * dp.size
        others = torch.device("meta") if spec.frozen else HOST
        self.weights, self.grads = torch.zeros(padded), torch.zeros(padded, device=others)
        self.exp_avg, self.exp_avg_sq = (torch.zeros(padded // dp.size, device=others) for _ in range(2))
        self.step = 0
        self.seed, self.draws = spec.seed, 0

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def move(self, device: torch.device) -> None:
        """All vectors, to a device or to (pinned) host memory. Views of them are of no use any more."""
        if device == self.device:
            return
        for name in _VECTORS:
            there = getattr(self, name)
            if there.is_meta:
                continue
            here = torch.empty(there.shape, device=device, pin_memory=device.type == "cpu" and there.is_cuda)
            setattr(self, name, here.copy_(there))

    def views(self, flat: Tensor) -> list[Tensor]:
        """A vector as parameters, sharing its memory."""
        parts = flat[: self.size].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def bind(self, parameters: Sequence[nn.Parameter]) -> None:
        """Parameters of fp32 share memory with the slot, the head among them, others are filled from it."""
        for parameter, weight, grad in zip(
            [*parameters, *self.head], self.views(self.weights), self.views(self.grads), strict=True
        ):
            if parameter.dtype == torch.float32:
                parameter.data, parameter.grad = weight, None if grad.is_meta else grad
            else:
                parameter.data.copy_(weight)
                parameter.grad = None

    def collect(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add gradients that did not go into the slot's own memory, in fp32."""
        for parameter, grad in zip([*parameters, *self.head], self.views(self.grads), strict=True):
            made = parameter.grad
            if made is not None and made.data_ptr() != grad.data_ptr():
                grad.add_(made)
                parameter.grad = grad if parameter.dtype == torch.float32 else None

    def let_go(self, parameters: Sequence[nn.Parameter]) -> None:
        """Share no memory with the parameters any more, whose shapes stay."""
        for parameter in (*parameters, *self.head):
            parameter.grad = None
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    def values(self, states: Tensor) -> Tensor:
        """[T], fp32: what the head makes of states [T, hidden]. The slot is bound."""
        weight, bias = self.head
        return nn.functional.linear(states.float(), weight, bias)[:, 0]

    def draw(self, row: int) -> None:
        """Seed dropout for one micro-batch of the present call."""
        torch.manual_seed(_seed(f"dropout {self.seed} {self.draws} {self.dp.rank} {row}"))

    def fill(self, flat: Tensor, parts: Sequence[Tensor]) -> None:
        """Overwrite a vector, or this rank's share of one, with values shaped as the parameters."""
        whole = flat if flat.numel() == self.weights.numel() else torch.zeros_like(self.weights)
        for view, part in zip(self.views(whole), parts, strict=True):
            view.copy_(part)
        if whole is not flat:
            flat.copy_(self.dp.part(whole))

    def whole(self, part: Tensor) -> list[Tensor]:
        """A moment of all data-parallel ranks, as parameters. Collective."""
        if self.dp.size == 1:
            return self.views(part)
        flat = torch.empty_like(self.weights)
        self.dp.join_parts(part, flat)
        return self.views(flat)

    def set_rng(self, saved: Saved) -> None:
        """Restore the dropout state of a checkpoint; after another kind of trainer, derive it from the seed
        and the step.
        """
        if "draws" in saved.rng:
            self.seed, self.draws = (int(number) for number in saved.rng["draws"])
        else:
            self.seed, self.draws = later_seed(self.spec.seed, saved.step), 0

    def rng(self) -> dict[str, np.ndarray]:
        return {"draws": np.array([self.seed, self.draws], np.int64)}

    def optim_step(
        self, lr: float, max_grad_norm: float, optimizer: Optimizer | None = None
    ) -> tuple[float, bool]:
        """(norm before clipping, applied).

        Gradients are zero afterwards either way. optimizer: of this step alone. Collective over all ranks.
        """
        grads = self.dp.reduced_part(self.grads)
        norm = self._norm(grads)
        applied = bool(np.isfinite(norm))
        if applied:
            if 0 < max_grad_norm < norm:
                grads.mul_(max_grad_norm / norm)
            self.step += 1
            mine = self.dp.part(self.weights)
            settings = optimizer or self.spec.optimizer
            adamw(mine, grads, self.exp_avg, self.exp_avg_sq, self.step, lr, settings)
            self.dp.join_parts(mine, self.weights)
        self.grads.zero_()
        return norm, applied

    def _norm(self, grads: Tensor) -> float:
        """L2 over the whole adapter, of which each rank has a share of its own, and the head."""
        if dist.get_world_size() == 1:
            return l2_norm(grads)
        counted = max(0, self._counted - self.dp.rank * grads.numel())
        total = torch.tensor([l2_norm(grads[:counted]) ** 2], dtype=torch.float64, device=grads.device)
        dist.all_reduce(total)
        return math.sqrt(total.item())


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
