"""What the fsdp trainer decides before it shards anything."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lorad.models.facts import read_facts
from lorad.models.hf.opening import read_config
from lorad.trainers.fsdp import architecture, experts, names, weights
from tests.models.bases import write_base
from tests.models.test_families import MIXTURES, make_model

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "first"),
    [(GPU, torch.bfloat16, "flash_attention_2"), (GPU, torch.float32, "sdpa"), (CPU, torch.bfloat16, "sdpa")],
)
def test_flash_attention_is_tried_where_it_works(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, first: str
) -> None:
    monkeypatch.setattr(architecture, "is_flash_attn_2_available", lambda: True)
    assert architecture.attentions(dtype, device)[0] == first
    monkeypatch.setattr(architecture, "is_flash_attn_2_available", lambda: False)
    assert architecture.attentions(dtype, device) == ["sdpa", "eager"]


def test_attention_that_is_not_installed_is_left(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    config = read_config(tmp_path)
    model = architecture.empty_model(config, torch.bfloat16, ["flash_attention_2", "sdpa"])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", [*MIXTURES, "qwen3"])
def test_experts_are_named_as_in_checkpoints(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family)
    model = architecture.empty_model(read_config(tmp_path), torch.float32, ["eager"])
    found = experts.experts_in(architecture.decoder_layers(model), model)
    if family == "gpt_oss":  # see `ADAPTS`
        assert not found
        return
    assert experts.expert_shapes(found) == read_facts(tmp_path).experts
    stored = {f"{name}.weight" for name in read_facts(tmp_path).experts}
    assert set(experts.parts_of(found)) == stored <= set(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(("norm", "is_found"), [(None, True), (False, True), (True, False)])
def test_experts_of_older_transformers_are_found(tmp_path: Path, norm: bool | None, is_found: bool) -> None:
    """norm: the mark of experts with a norm behind them, which transformers 5.17 does not set."""
    make_model(tmp_path, "qwen3_moe")
    model = architecture.empty_model(read_config(tmp_path), torch.float32, ["eager"])
    mixtures = [m for m in model.modules() if isinstance(getattr(m, "down_proj", None), torch.nn.Parameter)]
    assert mixtures
    for module in mixtures:
        module.__dict__.pop("has_post_expert_norm", None)
        if norm is not None:
            module.has_post_expert_norm = norm
    assert bool(experts.experts_in(architecture.decoder_layers(model), model)) is is_found


@pytest.mark.parametrize("family", ["qwen3_5", "mistral3", "nemotron_h", "llama4"])
def test_linears_are_named_as_in_the_file(tmp_path: Path, family: str) -> None:
    write_base(tmp_path, family)
    assert names._names(tmp_path) == sorted(read_facts(tmp_path).linears)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "mistral3", "nemotron_h"])
def test_ranks_read_their_rows_behind_other_prefixes(tmp_path: Path, family: str) -> None:
    write_base(tmp_path, family)
    model = architecture.empty_model(read_config(tmp_path), torch.float32, ["eager"])
    stored = load_file(tmp_path / "model.safetensors")
    places = weights._names_in_files(model, stored)
    assert {name: stored[places[name]].shape for name in places} == {
        name: tensor.shape for name, tensor in weights.weights(model)
    }


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_towers_are_not_counted(tmp_path: Path, family: str) -> None:
    write_base(tmp_path, family)
    model = architecture.empty_model(read_config(tmp_path), torch.float32, ["eager"])
    assert read_facts(tmp_path).parameters == sum(parameter.numel() for parameter in model.parameters())
