"""Sequences cut over ranks, as in DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509).

Each rank reads a part of the tokens, and in attention all tokens for a part of the heads. Two exchanges stand
before an attention and one after it; everything else in a layer computes each token by itself.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lorad.errors import SpecError
from lorad.models.ops import apply
from lorad.trainers.sharded.workers import DataParallel

_NAME = "lorad_ulysses"  # among transformers' attentions
_PLAIN = {"is_causal", "dropout", "scaling", "position_ids", "use_cache"}
"""The arguments that transformers gives every attention. Some families add others: a window, sinks, a cap."""


class Ulysses:
    """The attention of a model, over the ranks that share rows."""

    def __init__(self, group: DataParallel) -> None:
        self.group = group
        self.starts: Sequence[int] = ()  # of the sequences in the present whole row, and its end

    def install(self, config: Any) -> None:
        """Make models with this configuration attend by this from now on."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *_, **__: None)
        config._attn_implementation = _NAME

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        """Attend from q [1, heads, tokens here, dim] to k and v, which may have fewer heads.

        Return [1, tokens here, heads, dim].
        """
        asked = {name for name, value in more.items() if name not in _PLAIN and value not in (None, False)}
        if asked or mask is not None or more.get("dropout"):
            what = ", ".join(sorted(asked)) or "a mask of its own"
            raise SpecError(
                f"sequences of {type(module).__name__} cannot be cut over ranks: its attention has {what}",
                key="trainer.cp",
                hint="Set it to 1; activation_checkpointing: true saves memory, too.",
            )
        q, k, v = (apply(_Exchange, x[0], self.group, True) for x in (q, k, v))
        parts = [
            F.scaled_dot_product_attention(
                q[None, :, begin:end],
                k[None, :, begin:end],
                v[None, :, begin:end],
                is_causal=True,
                scale=more.get("scaling"),
                enable_gqa=len(q) != len(k),
            )[0]
            for begin, end in itertools.pairwise(self.starts)
        ]
        out: Tensor = apply(_Exchange, torch.cat(parts, 1), self.group, False)
        return out.transpose(0, 1)[None], None


class _Exchange(Function):
    """Turn [heads, tokens here, dim] into [heads here, tokens, dim] and back, which is also its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: DataParallel, to_heads: bool) -> Tensor:
        ctx.group = group
        ctx.to_heads = to_heads
        return _exchanged(x, group, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad, ctx.group, to_heads=not ctx.to_heads), None, None


def _exchanged(x: Tensor, group: DataParallel, *, to_heads: bool) -> Tensor:
    parts = group.size
    dim = x.shape[2]
    if to_heads:
        sent = x.reshape(parts, -1, x.shape[1], dim).contiguous()
    else:
        sent = x.reshape(len(x), parts, -1, dim).transpose(0, 1).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group.group)
    if to_heads:
        return got.transpose(0, 1).reshape(sent.shape[1], -1, dim)
    return got.reshape(-1, sent.shape[2], dim)
