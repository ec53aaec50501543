"""Bases whose linears are rounded to the grid of a narrow format."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorad.errors import SpecError
from lorad.models.base import Base
from lorad.models.directory import BUILTIN
from lorad.models.experts import mixture
from lorad.models.facts import read_facts, weights_sha256
from lorad.models.loading import load_base
from lorad.models.merge import gains_by_merging
from lorad.models.ops import swiglu
from lorad.models.packed import pack
from lorad.models.products.forms import linear
from lorad.protocol.pool_setup import Quantize
from tests.models.test_families import long_ids, of_transformers
from tests.models.test_models import lean

CPU = torch.device("cpu")
FORMS: list[Quantize] = ["nf4", "fp8"]
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)],
    np.float32,
)


def by_hand(weight: torch.Tensor, form: Quantize) -> torch.Tensor:
    """The nearest numbers of the grid; of two as near, fp8 has the even one."""
    numbers = weight.float().numpy()
    rows = numbers.reshape(-1, 64 if form == "nf4" else numbers.shape[1])
    grid = NF4 if form == "nf4" else np.concatenate([-E4M3[:0:-1], E4M3])
    scales = np.abs(rows).max(1, keepdims=True) / np.float32(1 if form == "nf4" else 448)
    odd = np.arange(len(grid)) % 2 * 1e-12 * (form == "fp8")
    exact = (rows / scales).astype(np.float64)
    above = np.searchsorted(grid, exact).clip(1, len(grid) - 1)
    far = [np.abs(exact - grid[place]) + odd[place] for place in (above - 1, above)]
    return torch.from_numpy((grid[above - (far[0] <= far[1])] * scales).reshape(numbers.shape))


def snapped(model: str, form: Quantize, target: Path) -> Path:
    """A checkpoint with linears as `by_hand` has them."""
    shutil.copytree(BUILTIN[model], target)
    tensors = load_file(target / "model.safetensors")
    made = {name: by_hand(t, form) if name.endswith("proj.weight") else t for name, t in tensors.items()}
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_rounded_checkpoint(
    form: Quantize, model: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    wanted = load_base(snapped(model, form, tmp_path / "snapped"), dtype, CPU)
    base = load_base(BUILTIN[model], dtype, CPU, form)
    assert torch.equal(lean(base, long_ids()), lean(wanted, long_ids()))


@pytest.mark.parametrize("form", FORMS)
def test_transformers_computes_the_same_logits(form: Quantize, tmp_path: Path) -> None:
    base = load_base(BUILTIN["builtin:tiny"], torch.float32, CPU, form)
    there = AutoModelForCausalLM.from_pretrained(snapped("builtin:tiny", form, tmp_path / "snapped"))
    plain = load_base(BUILTIN["builtin:tiny"], torch.float32, CPU)
    assert (lean(base, long_ids()) - of_transformers(there)).abs().max() < 1e-4
    assert (lean(plain, long_ids()) - of_transformers(there)).abs().max() > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_rounding_of_zeros_and_extremes(form: Quantize) -> None:
    weight = torch.zeros(4, 64)
    weight[1], weight[2, 3], weight[3, ::2] = 1e-30, -3e38, 5.0
    assert torch.equal(pack(weight, form, torch.float32, CPU).dense(), by_hand_or_zero(weight, form))


def by_hand_or_zero(weight: torch.Tensor, form: Quantize) -> torch.Tensor:
    """Rows of zeros stay zero."""
    made = torch.zeros_like(weight)
    made[1:] = by_hand(weight[1:], form)
    return made


def test_blocks_that_do_not_fill_are_refused() -> None:
    with pytest.raises(SpecError, match="64 numbers, which do not divide a linear") as refused:
        pack(torch.zeros(3, 32), "nf4", torch.float32, CPU)
    assert refused.value.key == "model.quantize"
    pack(torch.zeros(3, 32), "fp8", torch.float32, CPU)


def test_digest_of_weights_has_the_grid() -> None:
    path = BUILTIN["builtin:tiny"]
    assert len({weights_sha256(path, form) for form in (None, *FORMS)}) == 3


def rounded_and_dense(model: str, form: Quantize, target: Path) -> tuple[Base, Base]:
    """A packed base, and one with the same numbers as they are."""
    dense = load_base(snapped(model, form, target / "snapped"), torch.float32, CPU)
    return load_base(BUILTIN[model], torch.float32, CPU, form), dense


@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize("form", FORMS)
def test_packed_gradients_equal_those_of_dense(form: Quantize, model: str, tmp_path: Path) -> None:
    found = []
    for base in rounded_and_dense(model, form, tmp_path):
        x = torch.randn(40, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
        layer = base.layers[1]
        if layer.experts is None:
            assert layer.gate_up is not None and layer.down is not None
            out = linear(swiglu(linear(x, layer.gate_up, None)), layer.down, None)
        else:
            assert base.config.experts is not None
            out = mixture(x, layer.experts, base.config.experts)
        (linear(out, layer.qkv, None) ** 2).sum().backward()
        assert x.grad is not None
        found.append((out.detach(), x.grad))
    (out, grad), (wanted, wanted_grad) = found
    assert torch.equal(out, wanted) and torch.equal(grad, wanted_grad)


@pytest.mark.parametrize("model", BUILTIN)
@pytest.mark.parametrize(("form", "bytes_each"), [("nf4", 0.5625), ("fp8", 1.032)])
def test_linears_take_the_bytes_of_their_format(
    form: Quantize, bytes_each: float, model: str, tmp_path: Path
) -> None:
    base, dense = rounded_and_dense(model, form, tmp_path)
    rest = sum(4 * t.numel() for name, t in dense.weights() if not is_linear(name))
    numbers = sum(t.numel() for name, t in dense.weights() if is_linear(name))
    assert (base.nbytes() - rest) / numbers <= bytes_each
    facts = read_facts(BUILTIN[model])
    assert dense.nbytes() - base.nbytes() == facts.bytes("float32") - facts.bytes("float32", form)
    assert not gains_by_merging(base) and gains_by_merging(dense) == (dense.nbytes() <= 32 << 20)


def is_linear(name: str) -> bool:
    return name.rpartition(".")[2] in ("qkv", "o", "gate_up", "down")
