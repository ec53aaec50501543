"""Products with frozen weights: the quick kernel computes what torch's does, and is asked where it pays."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lorad.models.packed import Packed, pack
from lorad.models.products import forms as products
from lorad.models.products.forms import grouped, linear


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """oneDNN's kernel on any machine that has it: (rows, in, out) of each product that it was asked for."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    calls = list[tuple[int, int, int]]()

    plain = torch.ops.mkldnn._linear_pointwise

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, *more: object) -> Tensor:
        calls.append((len(x), x.shape[1], len(weight)))
        found: Tensor = plain(x, weight, bias, *more)
        return found

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", kernel)
    monkeypatch.setattr(products, "_leaves_avx512_unused", lambda: True)
    return calls


@pytest.mark.parametrize("shape", [(48, 384, 256), (5, 1024, 1025), (100, 1025, 1024)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradient_are_those_of_torch(
    asked: list[tuple[int, int, int]], shape: tuple[int, int, int], has_bias: bool
) -> None:
    rows, into, out = shape
    weight, bias = randn(out, into, seed=1), randn(out, seed=2) if has_bias else None
    ours, plain = (randn(rows, into).requires_grad_() for _ in range(2))
    found, expected = linear(ours, weight, bias), F.linear(plain, weight, bias)
    found.backward(randn(rows, out, seed=3))
    expected.backward(randn(rows, out, seed=3))
    aligned = {48: 48, 5: 8, 100: 104}[rows]
    assert asked == [(aligned, into, out), (aligned, out, into)]
    assert found.is_contiguous() and found.shape == (rows, out)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-4, rtol=1e-4)


def test_a_packed_weight_has_the_quick_kernel(asked: list[tuple[int, int, int]]) -> None:
    packed: Packed = pack(randn(1024, 512), "fp8", torch.float32, torch.device("cpu"))
    x = randn(8, 512, seed=1).requires_grad_()
    y = linear(x, packed)
    y.backward(randn(8, 1024, seed=2))
    assert len(asked) == 2
    torch.testing.assert_close(y, F.linear(x, packed.dense()), atol=1e-4, rtol=1e-4)


def test_experts_have_the_quick_kernel(asked: list[tuple[int, int, int]]) -> None:
    weights, ends = randn(2, 1024, 640), torch.tensor([9, 20], dtype=torch.int32)
    x = randn(20, 640, seed=1).requires_grad_()
    y = grouped(x, weights, ends)
    y.sum().backward()
    assert [rows for rows, *_ in asked] == [16, 16, 16, 16]
    expected = torch.cat([x[:9] @ weights[0].t(), x[9:] @ weights[1].t()])
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(x.grad[:9], weights[0].sum(0).expand(9, -1), atol=1e-3, rtol=1e-4)  # type: ignore[index]


@pytest.mark.parametrize("rows", [1, 4])
def test_few_rows_of_packed_weights_are_as_dense(rows: int) -> None:
    packed = pack(randn(1024, 512), "fp8", torch.float32, torch.device("cpu"))
    ours, plain = (randn(rows, 512, seed=1).requires_grad_() for _ in range(2))
    found, expected = linear(ours, packed), linear(plain, packed.dense())
    for y in (found, expected):
        y.backward(randn(rows, 1024, seed=2))
    assert ours.grad is not None and plain.grad is not None
    assert torch.equal(found, expected) and torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(randn(4, 512), id="few rows"),
        pytest.param(randn(32, 600)[:, :512], id="rows with gaps"),
        pytest.param(randn(32, 512).bfloat16(), id="another dtype"),
    ],
)
def test_torch_keeps_what_it_does_better(asked: list[tuple[int, int, int]], x: Tensor) -> None:
    weight = randn(512, 512, seed=1).to(x.dtype)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-3, rtol=1e-3)
    assert asked == []


def test_few_numbers_of_rows_are_compiled_for(asked: list[tuple[int, int, int]]) -> None:
    weight = randn(1024, 1024)
    for rows in (*range(5, 130), 770, 800, 801):
        linear(randn(rows, 1024), weight)
    assert sorted({rows for rows, *_ in asked}) == [*range(8, 137, 8), 800, 832]


def test_small_products_have_the_kernel_of_torch(asked: list[tuple[int, int, int]]) -> None:
    linear(randn(120, 256), randn(128, 256))
    assert asked == []


def test_a_row_reaches_no_other(asked: list[tuple[int, int, int]]) -> None:
    x = randn(33, 512)
    x[3] = float("nan")
    found = linear(x, randn(512, 512, seed=1))
    assert found.isnan().any(1).nonzero().ravel().tolist() == [3] and asked


@pytest.mark.parametrize(
    ("maker", "capability", "is_quick"),
    [("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False)],
)
def test_by_rule_amds_avx512_has_another_kernel(
    monkeypatch: pytest.MonkeyPatch, maker: str, capability: str, is_quick: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(products, "cpu_facts", lambda: {"vendor_id": maker})
    assert products._leaves_avx512_unused.__wrapped__() == is_quick


@pytest.mark.parametrize("form", sorted(products.FORMS))
@pytest.mark.parametrize("rows", [1, 3, 6, 33])
def test_every_form_computes_the_product(form: products.Form, rows: int) -> None:
    if form == "onednn" and not products.has_onednn():
        pytest.skip("this torch has no oneDNN")
    weight, bias = randn(700, 400, seed=1), randn(700, seed=2)
    if form == "vector" and rows > 1:
        with pytest.raises(RuntimeError, match="size mismatch"):
            products.FORMS[form](randn(rows, 400), weight, bias)
        return
    for turned in (weight, weight.t().contiguous().t()):
        x = randn(rows, 400)
        y = products.FORMS[form](x, turned, bias)
        assert y.is_contiguous() and y.shape == (rows, 700)
        torch.testing.assert_close(
            y.double(), F.linear(x.double(), weight.double(), bias.double()), atol=1e-4, rtol=1e-4
        )
