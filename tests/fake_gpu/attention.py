"""Attention on the fake device: the kernel that torch would choose for it, and what that keeps.

The choice is that of `sdp_utils.cpp` in torch 2.11 and later, which prefers cuDNN on compute capability 9.0
and 10.0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.fake_gpu.device import Attention, FakeGpu, on_gpu, where

_PLAIN = functional.scaled_dot_product_attention
_HALVES = (torch.bfloat16, torch.float16)
_PREFERS_CUDNN = (90, 100)


class FakeAttention:
    """Takes the place of `scaled_dot_product_attention`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not on_gpu(q):
            return _PLAIN(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        gpu = self._gpu
        kernel = _chosen(gpu, q, k, v, attn_mask, is_causal)
        backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        mask = "none" if attn_mask is None else str(attn_mask.dtype).removeprefix("torch.")
        gpu.attentions[Attention(kernel, mask, backward, where())] += 1
        if kernel == "cudnn":
            shapes = tuple((tuple(x.shape), x.stride()) for x in (q, k, v))
            gpu.plans.add((shapes, attn_mask is None or tuple(attn_mask.shape), is_causal, backward))
        if kernel == "math":
            return _plain(q, k, v, attn_mask, is_causal, scale)
        out: Tensor = _Fused.apply(gpu, q, k, v)  # type: ignore[no-untyped-call]
        return out


def _chosen(gpu: FakeGpu, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    """Choose the kernel as torch does."""
    half = q.dtype in _HALVES
    head = q.shape[-1]
    contiguous = all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (q, k, v))
    fits_cudnn = half and contiguous and head <= 128 and head % 8 == 0 and k.shape[2] != 1
    square = q.shape[2] == k.shape[2]
    fits_flash = half and contiguous and head <= 256 and mask is None and (square or not is_causal)
    fits_efficient = contiguous and q.shape[1] == k.shape[1] and head % (8 if half else 4) == 0
    if fits_cudnn and gpu.capability in _PREFERS_CUDNN and torch.backends.cuda.cudnn_sdp_enabled():
        return "cudnn"
    if fits_flash:
        return "flash"
    return "efficient" if fits_efficient else "math"


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Compute attention by one operation after another, as torch does without a fused kernel."""
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(later, float("-inf"))
    elif mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


class _Fused(torch.autograd.Function):
    """One kernel each way, which keeps q, k, v, what comes out and its logsumexp."""

    @staticmethod
    def forward(ctx: Any, gpu: FakeGpu, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.gpu = gpu

        def outputs() -> tuple[Tensor, Tensor]:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)

        out, logsumexp = gpu.as_one("attention", outputs)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        ctx.gpu.launch("attention backward")
        return None, torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
