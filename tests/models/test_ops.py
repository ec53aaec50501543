"""Hand-written backwards against autograd of the plain form."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.models.base import Base
from lorad.models.loading import load_base
from lorad.models.ops import QKNorm, Rope, recomputed, rms_norm, split_rotate, swiglu, upload
from lorad.models.products.forms import FEW, linear
from lorad.trainers.builtin import blocks
from lorad.trainers.builtin.attention import PackedAttention
from lorad.trainers.builtin.blocks import Layout, Sequences
from tests.conformance.reference import write_random_model

DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_backward(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], dtype: torch.dtype, *inputs: Tensor
) -> None:
    """Values and gradients of `ours` in dtype against those of `plain` in fp32; nothing is computed without
    need.
    """
    low, full = ([t.to(dtype).to(kind).requires_grad_() for t in inputs] for kind in (dtype, torch.float32))
    found, expected = ours(*low), plain(*full)
    grad = randn(*expected.shape, seed=9)
    found.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).float())
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (0.06, 0.05)
    torch.testing.assert_close(found.float(), expected, atol=atol, rtol=rtol)
    for mine, theirs in zip(low, full, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.float(), theirs.grad, atol=atol, rtol=rtol)
    assert torch.equal(ours(*(t.detach() for t in low)), found.detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    weight = 1 + randn(32, seed=1) / 4
    plain = lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.to(dtype).float()  # noqa: E731
    assert_backward(lambda x: rms_norm(x, weight.to(dtype), 1e-6), plain, dtype, randn(6, 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    assert_backward(swiglu, lambda x: F.silu(x[:, :16]) * x[:, 16:], dtype, randn(6, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_split_rotate(dtype: torch.dtype, normed: bool) -> None:
    angles = randn(5, 1, 4).repeat(1, 1, 2)
    sign = torch.tensor([-1.0] * 4 + [1.0] * 4)
    cos, sin, weight = (
        angles.cos().to(dtype),
        (angles.sin() * sign).to(dtype),
        (1 + randn(6, 8) / 4).to(dtype),
    )

    def ours(x: Tensor) -> Tensor:
        norm = QKNorm(weight, 1e-6) if normed else None
        return torch.cat(split_rotate(x, 4, norm, Rope(cos, sin)), -2)

    def plain(x: Tensor) -> Tensor:
        qk, v = x[:, :6], x[:, 6:]
        if normed:
            qk = qk * (qk.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()
        half = torch.cat([-qk[..., 4:], qk[..., :4]], -1)
        return torch.cat([qk * cos.float() + half * (sin.float() * sign), v], -2)

    assert_backward(ours, plain, dtype, randn(5, 8, 8))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Base]:
    directory: Path = write_random_model(tmp_path_factory.mktemp("base"))
    return {dtype: load_base(directory, dtype, torch.device("cpu")) for dtype in DTYPES}


RUNS = Sequences(  # two prompts; samples of both, not in their order, and one without tokens of its own
    starts=np.array([0, 3, 10, 15, 17, 29, 29]),
    lengths=np.array([3, 7, 5, 2, 12, 0, 1]),
    owner=np.array([-1, -1, 1, 0, 1, 0, 0]),
)


def sequence_by_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every sequence with its prompt before it, alone."""
    out = torch.zeros_like(q)
    for start, length, owner in zip(
        RUNS.starts.tolist(), RUNS.lengths.tolist(), RUNS.owner.tolist(), strict=True
    ):
        own = torch.arange(start, start + length)
        first = int(RUNS.starts[owner])
        seen = own if owner < 0 else torch.cat([torch.arange(first, first + int(RUNS.lengths[owner])), own])
        mask = torch.ones(length, len(seen), dtype=torch.bool).tril(len(seen) - length)
        keys, values = (t[0, seen].transpose(0, 1).repeat_interleave(2, 0) for t in (k, v))
        found = F.scaled_dot_product_attention(q[0, own].transpose(0, 1), keys, values, attn_mask=mask)
        out = out.index_copy(1, own, found.transpose(0, 1)[None])
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("long", [256, 8, 0])
def test_packed_attention_is_that_of_each_sequence_alone(
    bases: dict[torch.dtype, Base], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, long: int
) -> None:
    monkeypatch.setattr(blocks, "LONG", long)
    attention = PackedAttention(Layout(bases[dtype], 30, RUNS).move())
    assert {block.fused for block in attention.layout.blocks} == {256: {False}, 8: {False, True}, 0: {True}}[
        long
    ]
    inputs = randn(1, 30, 4, 16), randn(1, 30, 2, 16, seed=1), randn(1, 30, 2, 16, seed=2)
    assert_backward(lambda q, k, v: attention(0, q, k, v), sequence_by_sequence, dtype, *inputs)


def test_recomputed_layer_draws_the_same_again() -> None:
    generator = torch.Generator().manual_seed(3)
    found = []

    def layer(x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5, generator=generator)

    # two layers: the first is recomputed last
    for run in (layer, lambda x: recomputed(layer, x, x, [generator])):
        generator.manual_seed(3)
        x = randn(40).requires_grad_()
        y = run(run(x))
        y.sum().backward()
        found.append((y.detach(), x.grad, generator.get_state()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(700, 400), (400, 700)], ids=["tall", "wide"])
def test_few_rows_times_large_weights_are_exact(shape: tuple[int, int]) -> None:
    weight, bias, x = randn(*shape), randn(shape[0], seed=1), randn(FEW + 1, shape[1], seed=2)
    expected = F.linear(x.double(), weight.double(), bias.double())
    for rows in range(1, FEW + 2):
        with torch.no_grad():
            y = linear(x[:rows], weight, bias)
        assert y.is_contiguous() and (y - expected[:rows]).abs().max() < 1e-4


def test_arrays_reach_a_gpu_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []
    arrays: list[np.ndarray] = [
        np.arange(7),
        np.zeros((2, 0, 3), np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([[True], [False]]),
        np.arange(12).reshape(3, 4)[:, ::2],
    ]

    def to(tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        copies.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    moved = upload(arrays, torch.device("cuda:0"))
    for array, tensor in zip(arrays, moved, strict=True):
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert np.array_equal(tensor.numpy(), array)
    assert len(copies) == 1
