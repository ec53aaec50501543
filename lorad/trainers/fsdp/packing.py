"""Whether a model keeps the sequences of one row apart, found out on the model itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_FIRST, _SECOND = 24, 8  # tokens
_SEED = 20260101

Scores = Callable[[Tensor, Tensor], Tensor]
"""From ids [1, N] and positions [1, N] to logits [N, vocab]."""


@torch.no_grad()
def keeps_apart(scores: Scores, vocab: int, device: torch.device) -> bool:
    """Compares a sequence behind another with the same alone. Collective where `scores` is.

    What rounding does at any token is measured against what seeing the other sequence does where it does
    most: a quarter of that is far above the one and far below the other.
    """
    ids = torch.randint(vocab, (1, _FIRST + _SECOND), generator=torch.Generator().manual_seed(_SEED)).to(
        device
    )
    through = torch.arange(_FIRST + _SECOND, device=device)[None]
    restarted = torch.cat([through[:, :_FIRST], through[:, :_SECOND]], dim=1)
    alone = scores(ids[:, _FIRST:], through[:, :_SECOND]).float()
    packed = scores(ids, restarted)[_FIRST:].float()
    seeing = scores(ids, through)[_FIRST:].float()
    return bool((packed - alone).norm(dim=-1).max() <= (seeing - alone).norm(dim=-1).max() / 4)
