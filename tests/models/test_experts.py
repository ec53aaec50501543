"""A mixture of experts: what autograd makes of one written plainly, whoever else is in the batch."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lorad.models.base import Experts
from lorad.models.config import ExpertsConfig, parse_config
from lorad.models.directory import linear_shapes
from lorad.models.experts import mixture
from lorad.models.lora import FrozenLora, MixedLora
from lorad.models.merge import Merger
from lorad.models.products.forms import ends_of, grouped
from tests.kit.fakes.random_adapters import random_adapter
from tests.models.test_families import MIXTURES, load, long_ids, make_model, of_transformers
from tests.models.test_models import lean

HIDDEN, WIDTH, COUNT = 16, 12, 5
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 151936},
        14_315_784_192,
        2_689_173_504,
    ),
    "OLMoE-1B-7B": (
        {"model_type": "olmoe", "intermediate_size": 1024, "num_attention_heads": 16}
        | {"num_hidden_layers": 16, "vocab_size": 50304},
        6_919_161_856,
        1_282_017_280,
    ),
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000},
        46_702_792_704,
        12_879_925_248,
    ),
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "head_dim": 128}
        | {"num_attention_heads": 96, "num_hidden_layers": 46, "vocab_size": 151552, "attention_bias": True}
        | {"n_routed_experts": 128},
        106_852_251_264,
        13_424_129_664,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088}
        | {"num_attention_heads": 64, "num_hidden_layers": 24, "num_local_experts": 32},
        20_914_757_184,
        4_187_440_704,
    ),
}
"""What `config.json` has that no default says, parameters, and those that a token meets."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_published_models(name: str) -> None:
    data, parameters, active = PUBLISHED[name]
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 4096}
    config = parse_config(sizes | data, name)
    assert (config.num_parameters, config.num_active_parameters) == (parameters, active)


def made(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Experts, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype) * 0.5

    experts = Experts(
        numbers(COUNT, HIDDEN), numbers(COUNT, 2 * WIDTH, HIDDEN), numbers(COUNT, HIDDEN, WIDTH)
    )
    return experts, numbers(23, HIDDEN)


def plain(x: Tensor, experts: Experts, config: ExpertsConfig) -> Tensor:
    """Every expert for every token, those that it is not sent to with weight 0."""
    weights, index = (x @ experts.router.T).softmax(-1).topk(config.per_token)
    if config.is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    share = torch.zeros(len(x), COUNT).scatter(1, index, weights)
    gate, up = torch.einsum("ti,eoi->teo", x, experts.gate_up).chunk(2, -1)
    out = torch.einsum("tew,ehw->teh", F.silu(gate) * up, experts.down)
    return torch.einsum("te,teh->th", share, out)


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, COUNT])
def test_values_and_gradients_are_those_of_autograd(per_token: int, is_normalized: bool) -> None:
    (experts, x), config = made(), ExpertsConfig(COUNT, per_token, WIDTH, is_normalized)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    value, expected = mixture(ours, experts, config), plain(theirs, experts, config)
    assert torch.allclose(value, expected, atol=1e-6)
    along = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    value.backward(along)
    expected.backward(along)
    assert ours.grad is not None and theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(mixture(x, experts, config), value)  # sampling computes what training does


def test_few_rows_of_large_experts_are_computed_alike() -> None:
    """On a CPU a weight that has few rows comes first in its product, without a gradient to come."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(7, 192, 256, generator=random)
    of = torch.repeat_interleave(torch.arange(7), torch.arange(7))
    x = torch.randn(len(of), 256, generator=random, requires_grad=True)
    expected = torch.einsum("ri,roi->ro", x, weights[of])
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    found = grouped(x, weights, ends_of(of, 7))
    found.sum().backward()
    with torch.no_grad():
        assert torch.allclose(grouped(x.detach(), weights, ends_of(of, 7)), expected, atol=1e-4)
    assert x.grad is not None
    assert torch.allclose(found, expected, atol=1e-4) and torch.allclose(x.grad, wanted, atol=1e-4)


def test_experts_nobody_is_sent_to_change_nothing() -> None:
    experts, x = made()
    config = ExpertsConfig(COUNT, 1, WIDTH, False)
    one = x[:1]
    chosen = int((one @ experts.router.T).argmax())
    others = torch.arange(COUNT) != chosen
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    experts.gate_up[others], experts.down[others] = float("nan"), float("nan")
    assert mixture(one, experts, config).isfinite().all()


def test_tokens_are_computed_alike_in_any_order() -> None:
    (experts, x), config = made(), ExpertsConfig(COUNT, 2, WIDTH, True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.allclose(mixture(x[order], experts, config), mixture(x, experts, config)[order], atol=1e-6)


def test_bfloat16_is_weighted_in_bfloat16() -> None:
    (experts, x), config = made(dtype=torch.bfloat16), ExpertsConfig(COUNT, 2, WIDTH, True)
    value = mixture(x, experts, config)
    assert value.dtype == torch.bfloat16
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    wide = Experts(experts.router.float(), experts.gate_up.float(), experts.down.float())
    assert F.cosine_similarity(value.float(), plain(x.float(), wide, config)).mean() > 0.999


def weight_of(weights: dict[str, Tensor], module: str) -> Tensor:
    """A view of the weight in a checkpoint; gpt-oss holds those of all experts in two tensors, transposed."""
    if f"{module}.weight" in weights:
        return weights[f"{module}.weight"]
    experts, _, (number, linear) = (*module.partition(".experts.")[:2], module.split(".")[-2:])
    if linear == "down_proj":
        return weights[f"{experts}.experts.down_proj"][int(number)].mT
    return weights[f"{experts}.experts.gate_up_proj"][int(number)].mT[linear == "up_proj" :: 2]


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_on_experts_equal_merged_models(tmp_path: Path, family: str) -> None:
    make_model(tmp_path / "base", family)
    base, loras = load(tmp_path / "base"), []
    for seed in (1, 2):
        adapter = random_adapter(linear_shapes(base.config), seed)
        loras.append(FrozenLora(base, adapter.tensors, adapter.config.scale))
        shutil.copytree(tmp_path / "base", tmp_path / f"{seed}")
        weights = load_file(tmp_path / f"{seed}" / "model.safetensors")
        for module in adapter.config.modules:
            a, b = (torch.tensor(adapter.tensors[f"{module}.lora_{half}.weight"]) for half in "AB")
            weight_of(weights, module).add_(adapter.config.scale * b @ a)
        save_file(weights, tmp_path / f"{seed}" / "model.safetensors", {"format": "pt"})
    expected = [
        of_transformers(AutoModelForCausalLM.from_pretrained(tmp_path / f"{seed}")) for seed in (1, 2)
    ]
    alone = [lean(base, long_ids(), lora) for lora in loras]
    for lora, ours, theirs in zip(loras, alone, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-3
        assert (lean(base, long_ids()) - theirs).abs().max() > 0.1
        merged, rest = Merger(base).alone(lora)
        assert rest is None and (lean(merged, long_ids()) - theirs).abs().max() < 1e-3
    for owner in ([0, 1], [1, 0], [2, 1], [1, 1]):
        together = MixedLora(base, [*loras, None])
        together.assign(np.repeat(owner, long_ids().shape[1]))
        mixed = lean(base, long_ids(), together)
        for row, which in enumerate(owner):
            whole = [*alone, lean(base, long_ids())][which]
            assert (mixed[row] - whole[row]).abs().max() < 1e-4
