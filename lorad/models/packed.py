"""Linears of a frozen base on the grid of a narrow format, in its own few bits.

nf4: 4-bit NormalFloat of QLoRA (arXiv 2305.14314, appendix E): 16 values, times the largest magnitude of each
64 numbers along the flattened weight, in fp32; codes and numbers are bit for bit those of bitsandbytes
without double quantization. fp8: e4m3 (arXiv 2209.05433) with one fp32 scale for each output row, the largest
magnitude divided by 448, as vLLM and compressed-tensors have it for weights per channel.

Numbers are read from the checkpoint, whatever dtype the base is computed in, and what a code means is taken
times its scale in fp32 and rounded once to that dtype: all who compute with a packed weight compute with the
same numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lorad.models.facts import NF4_BLOCK, refuse_unfilled
from lorad.protocol.pool_setup import Quantize

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_E4M3 = 448.0  # the largest number of float8_e4m3fn
_TINIEST = 1e-38  # a scale of zeros
_CHUNK = 1 << 20  # numbers that are fp32 at once


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight, or several of one shape.

    Attributes:
        shape: [out, in] or [experts, out, in].
        dtype: What `dense` returns.
        codes: The codes of each block. In nf4 they are uint8 [blocks, 32], the first number of a byte in its
            upper half; in fp8 float8 [blocks, in].
        scales: The scale of each block, fp32 [blocks].
    """

    form: Quantize
    shape: tuple[int, ...]
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor

    def numel(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, index: int) -> "Packed":
        """Return one of several weights. Raises IndexError."""
        if not 0 <= index < self.shape[0]:
            raise IndexError(index)
        blocks = len(self.scales) // self.shape[0]
        part = slice(index * blocks, (index + 1) * blocks)
        return Packed(self.form, self.shape[1:], self.dtype, self.codes[part], self.scales[part])

    def dense(self) -> Tensor:
        """Return the numbers, in `dtype`."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        rows = whole.view(len(self.scales), -1)
        step = max(1, _CHUNK // rows.shape[1])
        pairs = _pairs(self.codes.device) if self.form == "nf4" else None
        for codes, scales, into in zip(
            self.codes.split(step), self.scales.split(step), rows.split(step), strict=True
        ):
            values = codes.float() if pairs is None else pairs[codes.int()].view(len(scales), -1)
            torch.mul(values, scales[:, None], out=into)
        return whole


def stacked(parts: Sequence[Packed], shape: tuple[int, ...]) -> Packed:
    """Return weights one above the other, in this shape."""
    first = parts[0]
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    return Packed(first.form, shape, first.dtype, codes, scales)


def pack(weight: Tensor, form: Quantize, dtype: torch.dtype, device: torch.device) -> Packed:
    """Round a weight [out, in] to the nearest numbers of the grid.

    `dtype` and `device` are those of the base. Raises SpecError for a weight that blocks do not fill.
    """
    if form == "nf4":
        refuse_unfilled({"a linear": (weight.shape[0], weight.shape[1])})
    rows = weight.view(-1, NF4_BLOCK if form == "nf4" else weight.shape[-1])
    codes = list[Tensor]()
    scales = list[Tensor]()
    for chunk in rows.split(max(1, _CHUNK // rows.shape[1])):
        part = chunk.float()
        largest = part.abs().amax(1)
        if form == "fp8":
            scales.append(largest.clamp(min=_TINIEST) / _E4M3)
            nearest = (part / scales[-1][:, None]).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn)
        else:
            values = torch.tensor(_NF4, device=part.device)
            between = (values[:-1] + values[1:]) / 2
            scaled = (part * (1.0 / largest.clamp(min=_TINIEST))[:, None]).clamp(-1, 1)
            indices = torch.bucketize(scaled, between, out_int32=True).to(torch.uint8)
            scales.append(largest)
            nearest = indices[:, ::2] << 4 | indices[:, 1::2]
        codes.append(nearest)
    _pairs(device)
    return Packed(form, tuple(weight.shape), dtype, torch.cat(codes).to(device), torch.cat(scales).to(device))


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte of nf4, fp32 [256, 2], made before a GPU's steps are captured."""
    values = torch.tensor(_NF4, device=device)
    return torch.cartesian_prod(values, values)
