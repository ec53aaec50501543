"""How A begins; B is zero, so a new adapter changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lorad.errors import AdapterRefused

NORMAL_STD = 0.2


def initial_a(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A of shape [rank, in], fp32 on the CPU, drawn from `generator`.

    kaiming: kaiming_uniform(a=sqrt(5)), that is U(-b, b) with b = 1 / sqrt(in), PEFT's default. xavier,
    normal (std 0.2) and zero are those of Megatron-Bridge's LoRA: xavier is N(0, 2 / (in + rank)). Raises
    AdapterRefused for another kind.
    """
    rank, into = shape
    if kind == "kaiming":
        return torch.empty(shape).uniform_(-(into**-0.5), into**-0.5, generator=generator)
    stds = {"xavier": (2 / (into + rank)) ** 0.5, "normal": NORMAL_STD, "zero": 0.0}
    if kind not in stds:
        raise AdapterRefused(f"no init {kind!r} of A", hint=f"choose one of kaiming, {', '.join(stds)}")
    return torch.empty(shape).normal_(0, stds[kind], generator=generator)
