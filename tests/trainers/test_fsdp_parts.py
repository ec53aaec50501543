"""What the fsdp trainer decides before it shards anything."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorad.trainers.fsdp import architecture, experts
from tests.models.test_families import make_model

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
    config = architecture.read_config(tmp_path)
    model = architecture.empty_model(config, torch.bfloat16, ["flash_attention_2", "sdpa"])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "count"), [("qwen3_moe", 8), ("qwen2_moe", 8), ("olmoe", 8), ("mixtral", 0), ("qwen3", 0)]
)
def test_experts_are_found_where_names_agree(tmp_path: Path, family: str, count: int) -> None:
    """Checkpoints of Mixtral call the linears of an expert w1, w2 and w3."""
    sizes: dict[str, Any] = {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    if family == "qwen2_moe":
        sizes |= {"shared_expert_intermediate_size": 16}
    if family in ("qwen3", "mixtral"):
        sizes = {"num_local_experts": 4} if family == "mixtral" else {}
    make_model(tmp_path, family, **sizes)
    model = architecture.empty_model(architecture.read_config(tmp_path), torch.float32, ["sdpa"])
    found = experts.experts_in(architecture.decoder_layers(model), model)
    assert len(experts.names_of(found)) == count
    assert len(experts.expert_shapes(found)) == 3 * count
