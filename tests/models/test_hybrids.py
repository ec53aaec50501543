"""Gated delta nets beside gated attention, as in Qwen3.5 and Qwen3-Next, against transformers and PEFT."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from lorad.backends.activations import kept
from lorad.errors import SpecError
from lorad.models.base import Base, Delta
from lorad.models.config import DeltaConfig, parse_config
from lorad.models.decoder import hidden, logits
from lorad.models.delta.net import Net
from lorad.models.delta.states import bytes_per_row
from lorad.models.directory import linear_shapes, read_config
from lorad.models.facts import read_facts
from lorad.models.kv import DecodeAttention, ExtendAttention, KVCache, PrefillAttention, bytes_per_token
from lorad.models.loading import load_base
from lorad.models.lora import FrozenLora
from lorad.protocol.pool_setup import Quantize
from tests.models.bases import write_hybrid
from tests.models.test_models import CPU, lean, peft_tensors, rewrite_config, with_peft
from tests.models.test_packed import by_hand

LENGTHS = [70, 3, 129, 64]  # of prompts; the second is shorter than the convolution
FAMILIES = ["qwen3_5", "qwen3_next"]


def some_ids() -> torch.Tensor:
    return torch.randint(5, 100, (4, 200), generator=torch.Generator().manual_seed(3))


def of_transformers(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    kind = getattr(transformers, read_config(directory).architecture)
    return kind.from_pretrained(directory, dtype=dtype).eval()


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=some_ids()).logits.float()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    write_hybrid(path, family=request.param)
    return path


@pytest.fixture(scope="module")
def expected(directory: Path) -> torch.Tensor:
    return scores(of_transformers(directory))


@pytest.fixture(scope="module")
def base(directory: Path) -> Base:
    return load_base(directory, torch.float32, CPU)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with a tower"])
def test_logits_equal_those_of_transformers(tmp_path: Path, alone: bool, tied: bool) -> None:
    write_hybrid(tmp_path, alone=alone, tie_word_embeddings=tied, linear_num_value_heads=3, head_dim=16)
    model = of_transformers(tmp_path)
    base = load_base(tmp_path, torch.float32, CPU)
    assert (lean(base, some_ids()) - scores(model)).abs().max() < 2e-5
    text = (tensor for name, tensor in model.named_parameters() if "visual" not in name)
    assert base.config.num_parameters == sum(tensor.numel() for tensor in text)
    facts = read_facts(tmp_path)
    assert facts.bytes("float32") == 4 * base.config.num_parameters
    assert (facts.states, facts.cached * 4) == (bytes_per_row(base), bytes_per_token(base))


def test_the_checksum_sees_every_weight(directory: Path, base: Base, tmp_path: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"):
        path = f"{base.config.prefix}layers.0.linear_attn.{name}"
        save_file({**tensors, path: tensors[path] * 1.5}, tmp_path / "model.safetensors", {"format": "pt"})
        assert load_base(tmp_path, torch.float32, CPU).checksum() != base.checksum(), name


def test_states_remember_early_tokens(base: Base) -> None:
    ids = some_ids()
    changed = ids.clone()
    changed[:, 0] += 1
    assert (lean(base, ids) - lean(base, changed))[:, -1].abs().max() > 1e-3


def test_prefill_and_decoding_equal_the_full_forward(base: Base, expected: torch.Tensor) -> None:
    ids = some_ids()
    lengths = torch.tensor(LENGTHS)
    cache = KVCache(base, 4, 200)
    every = torch.arange(4)
    with torch.no_grad():
        prompts = hidden(base, ids[:, :129], torch.arange(129), PrefillAttention(cache, lengths))
        assert_close(logits(base, prompts), expected, [0] * 4, LENGTHS)
        now = lengths.clone()
        for _ in range(40):
            attention = DecodeAttention(cache, now, int(now.max()) + 1)
            states = hidden(base, ids[every, now][:, None], now[:, None], attention)
            assert (logits(base, states[:, 0]) - expected[every, now]).abs().max() < 2e-5
            now += 1


def assert_close(found: torch.Tensor, expected: torch.Tensor, starts: list[int], counts: list[int]) -> None:
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert (found[row, :count] - expected[row, start : start + count]).abs().max() < 2e-5


def test_prefill_goes_on_behind_any_token(base: Base, expected: torch.Tensor) -> None:
    ids = some_ids()
    starts = [64, 0, 1, 2]
    counts = [6, 3, 100, 80]
    cache = KVCache(base, 4, 200)
    rows = torch.stack([ids[row, start : start + 100] for row, start in enumerate(starts)])
    with torch.no_grad():
        hidden(base, ids[:, :64], torch.arange(64), PrefillAttention(cache, torch.tensor(starts)))
        attention = ExtendAttention(cache, torch.tensor(starts), 100, torch.tensor(counts))
        found = logits(base, hidden(base, rows, attention.places, attention))
    assert_close(found, expected, starts, counts)


def test_slots_keep_their_states_when_they_move(base: Base, expected: torch.Tensor) -> None:
    ids = some_ids()
    cache = KVCache(base, 4, 130)
    whole = KVCache(base, 1, 130)
    with torch.no_grad():
        hidden(base, ids[:, :129], torch.arange(129), PrefillAttention(cache, torch.tensor(LENGTHS)))
        whole.fill(slice(0, 1), cache, torch.tensor([2]))
        whole.resize(3, 160, 1)
        whole.move(torch.tensor([0]), torch.tensor([2]), 129)
        whole.resize(2, 160, 1)
        attention = DecodeAttention(whole, torch.tensor([129]), 130)
        states = hidden(base, ids[2:3, 129:130], torch.tensor([[129]]), attention)
    assert (logits(base, states[:, 0]) - expected[2, 129]).abs().max() < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_exact_as_in_transformers(family: str, tmp_path: Path) -> None:
    """All tokens go through all experts, see `test_families.py`."""
    write_hybrid(tmp_path, family=family, num_experts_per_tok=4)
    expected = scores(of_transformers(tmp_path))
    noise = (scores(of_transformers(tmp_path, torch.bfloat16)) - expected).square().mean().sqrt()
    found = lean(load_base(tmp_path, torch.bfloat16, CPU), some_ids()).float()
    assert (found - expected).square().mean().sqrt() < 1.5 * noise


def linears_of(base: Base) -> list[str]:
    """Return all linears; of mixtures without those of experts, which PEFT has in one tensor."""
    return [name for name in linear_shapes(base.config) if base.config.experts is None or "mlp" not in name]


def test_lora_on_every_linear_equals_peft(directory: Path, base: Base) -> None:
    wrapped = with_peft(of_transformers(directory), linears_of(base))
    lora = FrozenLora(base, peft_tensors(wrapped), 2.0)
    assert (lean(base, some_ids(), lora) - scores(wrapped)).abs().max() < 2e-4
    assert (lean(base, some_ids()) - scores(wrapped)).abs().max() > 1e-2


def test_dora_on_every_linear_equals_peft(directory: Path, base: Base) -> None:
    wrapped = with_peft(of_transformers(directory), linears_of(base), dora=True)
    lora = FrozenLora(base, peft_tensors(wrapped), 2.0)
    assert (lean(base, some_ids(), lora) - scores(wrapped)).abs().max() < 2e-4


@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_rounded_linears_are_those_of_a_rounded_checkpoint(
    directory: Path, base: Base, form: Quantize, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in linear_shapes(base.config):
        if name != "lm_head":
            tensors[f"{name}.weight"] = by_hand(tensors[f"{name}.weight"], form)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    rounded = load_base(directory, torch.float32, CPU, form)
    assert (lean(rounded, some_ids()) - scores(of_transformers(tmp_path))).abs().max() < 2e-5


@pytest.mark.parametrize("time", [16, 64, 300])
def test_what_a_net_makes_again_is_foreseen(directory: Path, time: int) -> None:
    sizes = DeltaConfig(frozenset({0}), 4, 8, 64, 64, 4)
    weights = Delta(torch.randn(sizes.mixed, 4), -torch.rand(8), torch.randn(8), torch.ones(64))
    net = Net(sizes, weights, 1e-6)
    x = torch.randn(2, time, net.fed, requires_grad=True)
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net.run(x, net.nothing(x))
    facts = replace(read_facts(directory), recurred=sizes.mixed + sizes.values)
    foreseen = kept(facts, 4).recomputed - kept(replace(facts, recurred=0), 4).recomputed
    assert foreseen / 2 < sum(held.values()) / (2 * time) < foreseen


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_defaults_are_those_of_transformers(family: str) -> None:
    whole = AutoConfig.for_model(family, num_hidden_layers=8).to_dict()
    named = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    short = {key: whole[key] for key in ("model_type", "max_position_embeddings", *named)}
    assert parse_config(short, "short") == parse_config(whole, "whole")
    assert parse_config(short, "short").attentions == (3, 7)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "for 4 layers"),
        ({"layer_types": ["full_attention"]}, "for 4 layers"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "sliding"),
        ({"attention_bias": True}, "biases of attention"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "3 value heads over 2"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim is None"),
    ],
)
def test_what_is_not_computed_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    write_hybrid(tmp_path, alone=True)
    rewrite_config(tmp_path, **changes)
    with pytest.raises(SpecError, match=named):
        read_config(tmp_path)
