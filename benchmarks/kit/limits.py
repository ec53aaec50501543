"""What this machine can do at best: the limits that decoding and training are compared with."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kit.workload import Stopwatch
from lorad.models.products.forms import linear

SQUARE = 2048  # rows of the gemm's matrices
WIDE = 4096  # columns of the gemv's matrix
TRIES = 3  # a limit is the best that was seen just now


class Limits:
    """gemv: bytes of a matrix read per second, in a matrix as large as the model. gemm: FLOP per second,
    square, by the quicker of torch's kernel and lorad's own.
    """

    def __init__(self, dtype: torch.dtype, parameters: int) -> None:
        self.matrix = torch.randn(SQUARE, SQUARE).to(dtype)
        self.wide = torch.randn(parameters // WIDE, WIDE).to(dtype)
        self.vector = torch.randn(WIDE).to(dtype)
        self.gemm(), self.gemv()

    def gemm(self) -> float:
        kernels = torch.mm, lambda left, right: linear(left, right.t())
        work = 2 * SQUARE**3
        return max(self._rate(k, self.matrix, self.matrix, work) for k in kernels for _ in range(TRIES))

    def gemv(self) -> float:
        size = self.wide.numel() * self.wide.element_size()
        return max(self._rate(torch.mv, self.wide, self.vector, size) for _ in range(4 * TRIES))

    @staticmethod
    def _rate(product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, work: int) -> float:
        watch = Stopwatch()
        product(left, right)
        return work / watch.lap()
