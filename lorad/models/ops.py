"""Building blocks of the forward whose backward is written by hand: fewer passes and fewer saved tensors.

Without a gradient to come they are the plain calls, so trainer and engine compute the same bits. Everything
runs in the dtype of its input on any device; sums of squares are taken in fp32.

Products with weights are in lorad/models/products/forms.py.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

_ALIGNED = 64  # bytes that parts of one copy begin at a multiple of


def prepare(device: torch.device) -> None:
    """Make this thread compute on a device with the kernels that lorad relies on, before a base is loaded.

    Attention never takes cuDNN's, which torch prefers on an H100: it builds a plan for each new shape, for up
    to a second, and its backward under a mask gives NaN at some lengths (pytorch#196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are made there


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors on a device. A GPU gets them in one copy out of pinned memory, for which the
    host does not wait; there they are parts of one tensor.
    """
    flat = [np.ascontiguousarray(array) for array in arrays]
    if device.type != "cuda" or not flat:
        return [torch.from_numpy(array).to(device) for array in flat]
    ends = np.cumsum([-(-array.nbytes // _ALIGNED) * _ALIGNED for array in flat]).tolist()
    pinned = torch.empty(ends[-1], dtype=torch.uint8).pin_memory()
    host = pinned.numpy()
    parts = [slice(end, end + array.nbytes) for end, array in zip([0, *ends], flat, strict=False)]
    for part, array in zip(parts, flat, strict=True):
        host[part] = array.reshape(-1).view(np.uint8)
    copied = pinned.to(device, non_blocking=True)
    dtypes = [torch.from_numpy(array).dtype for array in flat]
    return [
        copied[part].view(dtype).view(array.shape)
        for part, dtype, array in zip(parts, dtypes, flat, strict=True)
    ]


def download(tensor: Tensor) -> Any:
    """Return the numbers of a tensor as lists; a GPU's by one copy into pinned memory."""
    if tensor.device.type != "cuda":
        return tensor.tolist()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return pinned.tolist()


def hold_to_same_bits(device: torch.device) -> None:
    """Have torch compute on a GPU by kernels alone that give the same bits each time. Call it before a base
    is loaded.

    torch refuses by name what has no such kernel. On a CPU, where all that lorad computes repeats as long as
    its threads do, nothing changes.
    """
    if device.type == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it with its first product
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Rope(NamedTuple):
    """Rotary embedding at given positions; `sin` has its first half negated, so one roll replaces
    rotate_half.
    """

    cos: Tensor  # [batch or 1, time, 1, rotated]: of so many numbers of a head, the first ones
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        if x.shape[-1] > (rotated := self.cos.shape[-1]):
            return torch.cat([self.rotate(x[..., :rotated]), x[..., rotated:]], -1)
        return torch.addcmul(x * self.cos, torch.roll(x, x.shape[-1] // 2, -1), self.sin)

    def rotate_back(self, y: Tensor) -> Tensor:
        """Return the transpose of `rotate`: the gradient of its argument."""
        if y.shape[-1] > (rotated := self.cos.shape[-1]):
            return torch.cat([self.rotate_back(y[..., :rotated]), y[..., rotated:]], -1)
        return (y * self.cos).add_(torch.roll(y * self.sin, y.shape[-1] // 2, -1))


class QKNorm(NamedTuple):
    """RMSNorm over each head of q and k, or over all heads of q and all of k.

    Attributes:
        heads: The heads of q where a norm is over all of them; 0 where each has its own.
    """

    weight: Tensor  # [heads + kv heads, head_dim]
    eps: float
    heads: int = 0

    def normed(self, qk: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return qk [..., heads + kv heads, head_dim] with its norms, and 1 / rms of each part."""
        if not self.heads:  # decoding a small model, a list would be noticed
            normed, r = _rms_norm(qk, None, self.eps)
            return normed * self.weight, [r]
        parts = [_rms_norm(part, None, self.eps) for part in self._parts(qk)]
        return self._joined([part for part, _ in parts], qk) * self.weight, [r for _, r in parts]

    def backward(self, grad: Tensor, qk: Tensor, r: Sequence[Tensor]) -> Tensor:
        """Return the gradient with respect to qk."""
        parts = zip(self._parts(grad), self._parts(qk), self._parts(self.weight), r, strict=True)
        return self._joined([_rms_norm_backward(*part) for part in parts], qk)

    def _parts(self, qk: Tensor) -> list[Tensor]:
        """Return what the norms are over, as last dimension."""
        if not self.heads:
            return [qk]
        return [qk[..., : self.heads, :].flatten(-2), qk[..., self.heads :, :].flatten(-2)]

    def _joined(self, parts: Sequence[Tensor], qk: Tensor) -> Tensor:
        return torch.cat(list(parts), -1).view(qk.shape) if self.heads else parts[0]


def apply(function: type[Function], *arguments: Any) -> Any:
    """Call `function.apply`, which torch leaves untyped."""
    return function.apply(*arguments)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm (arXiv 1910.07467) over the last dimension."""
    return apply(_RmsNorm, x, weight, eps) if x.requires_grad else F.rms_norm(x, x.shape[-1:], weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up (arXiv 2002.05202); the last dimension holds gate, then up."""
    return apply(_SwiGlu, gate_up) if gate_up.requires_grad else _SwiGlu.plain(gate_up)


def clamped_swiglu(gate_up: Tensor, limit: float, gain: float) -> Tensor:
    """Compute (up + 1) * gate * sigmoid(gain * gate), up within -limit and limit and gate at most limit, as
    gpt-oss (OpenAI, 2025, arXiv 2508.10925) has it; the last dimension holds gate, then up.
    """
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * gain))


def split_rotate(qkv: Tensor, heads: int, norm: QKNorm | None, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
    """Split [..., heads + 2 kv heads, head_dim] into q, k and v; q and k are normalised, if there is a norm,
    and rotated.
    """
    if qkv.requires_grad:
        return apply(_SplitRotate, qkv, heads, norm, rope)  # type: ignore[no-any-return]
    return _SplitRotate.run(qkv, heads, norm, rope)[:3]


def recomputed(
    layer: Callable[[Tensor], Tensor], x: Tensor, anchor: Tensor, generators: Sequence[torch.Generator]
) -> Tensor:
    """Compute layer(x) and keep only x: the backward computes the rest again (arXiv 1604.06174).

    The layer puts its parameters' gradients where they belong by itself; it has some, or x requires grad.

    Args:
        anchor: Any tensor that requires grad.
        generators: All that the layer draws from; the second time they give what they gave the first time,
            and end as if there had been no second time.
    """
    return apply(_Recomputed, x, anchor, layer, generators)  # type: ignore[no-any-return]


class _Recomputed(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        layer: Callable[[Tensor], Tensor],
        generators: Sequence[torch.Generator],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        ctx.generators = generators
        ctx.before = [generator.get_state() for generator in generators]
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[0])
        now = [generator.get_state() for generator in ctx.generators]
        for generator, state in zip(ctx.generators, ctx.before, strict=True):
            generator.set_state(state)
        with torch.enable_grad():
            y = ctx.layer(x)
        for generator, state in zip(ctx.generators, now, strict=True):
            generator.set_state(state)
        torch.autograd.backward(y, grad)
        return x.grad, None, None, None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, r = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        return _rms_norm_backward(grad, x, weight, r), None, None


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return what F.rms_norm does, bit for bit, and 1 / rms(x): fp32 [..., 1]."""
    result: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
    return result


def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
    """Return r t - r^3 x mean(t x), with r = 1 / rms(x) and t = grad * weight: the gradient with respect to
    x.
    """
    x32 = x.float()
    t = grad.float() * weight
    along = (t * x32).mean(-1, keepdim=True).mul_(r.pow(3)).neg_()
    return t.mul_(r).addcmul_(x32, along).to(x.dtype)


class _SwiGlu(Function):
    @staticmethod
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        if gate_up.device.type != "cpu":
            ctx.save_for_backward(gate_up)
            return _SwiGlu.plain(gate_up)
        gate, up = gate_up.chunk(2, -1)
        activated = F.silu(gate)  # exp costs a CPU three times a product
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, *kept = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        to_gate, to_up = result.chunk(2, -1)
        torch.mul(kept[0] if kept else F.silu(gate), grad, out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return result


class _SplitRotate(Function):
    @staticmethod
    def run(
        qkv: Tensor, heads: int, norm: QKNorm | None, rope: Rope
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return q, k, v and 1 / rms of what of q and k has norms."""
        turned = (qkv.shape[-2] + heads) // 2  # heads of q, k, v that belong to q and k
        qk = qkv[..., :turned, :]
        r = list[Tensor]()
        if norm is not None:
            qk, r = norm.normed(qk)
        qk = rope.rotate(qk)
        return qk[..., :heads, :], qk[..., heads:, :], qkv[..., turned:, :], r

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, norm: QKNorm | None, rope: Rope
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.norm = norm
        ctx.rope = rope
        q, k, v, r = _SplitRotate.run(qkv, heads, norm, rope)
        ctx.save_for_backward(*([qkv, *r] if r else []))
        # three tensors: the outputs of a Function share no memory
        return q.contiguous(), k.contiguous(), v.contiguous()

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None, None, None]:
        qk = ctx.rope.rotate_back(torch.cat([q, k], -2))
        if ctx.norm is not None:
            qkv, *r = ctx.saved_tensors
            qk = ctx.norm.backward(qk, qkv[..., : qk.shape[-2], :], r)
        return torch.cat([qk, v], -2), None, None, None
