"""Stands in for SGLang's kernels on a CPU: every name imports, a call of one says which is missing.

On a CPU without AMX, SGLang 0.5.23 takes torch's own kernels everywhere but for the hash behind seeded
sampling, which is here, after `sglang/kernels/ops/sampling/murmur_hash.py`, and for layers of Qwen3.5, see
`hybrid.py`.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sgl_kernel import hybrid  # noqa: F401

__version__ = "0.0.0"
WORD = 0xFFFFFFFF


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this machine")

    return missing


def rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & WORD


def times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """x * factor modulo 2**32, of 32-bit words in int64, without overflow."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & WORD


def mixed(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = times(rotated(times(k & WORD, 0xCC9E2D51), 15), 0x1B873593)
    return (times(rotated(h ^ k, 13), 5) + 0xE6546B64) & WORD


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """uint32 [rows, columns]: MurmurHash3 of (seed's two halves, position, column)."""
    seed = seed.view(torch.int64)
    h = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions.to(torch.int64)):
        h = mixed(h, word)
    h = mixed(h[:, None], columns.to(torch.int64)[None, :]) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = times(h ^ (h >> shift), factor)
    return (h ^ (h >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
