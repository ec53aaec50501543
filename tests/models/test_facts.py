"""What is known of a model from its configuration and the headers of its weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lorad.errors import SpecError
from lorad.models import facts
from lorad.models.directory import read_json, resolve
from lorad.models.facts import read_facts, weights_sha256
from tests.kit.fakes.foreign_models import EXPERTS, make_moe, tensors
from tests.models.bases import write_base

TINY = resolve("builtin:tiny")


def test_headers_agree_with_config_for_known_families() -> None:
    assert facts._of_headers(read_json(TINY / "config.json"), TINY) == read_facts(TINY)


@pytest.mark.parametrize("nested", [False, True])
def test_another_architecture_is_read_from_its_headers(nested: bool, tmp_path: Path) -> None:
    make_moe(tmp_path, nested=nested)
    found = read_facts(tmp_path)
    assert (found.vocab, found.max_positions, found.dtype, found.cached) == (
        112,
        2048,
        "bfloat16",
        2 * 2 * 1 * 4,
    )
    held = {name: tensor for name, tensor in tensors().items() if "visual" not in name}
    assert found.parameters == sum(tensor.size for tensor in held.values())
    assert found.bytes() == 2 * found.parameters
    assert found.linears["model.layers.1.self_attn.k_proj"] == (4, 8)


def test_targets_leave_out_experts_and_vision(tmp_path: Path) -> None:
    make_moe(tmp_path)
    found = read_facts(tmp_path)
    leaves = {name.rpartition(".")[2] for name in found.linears}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "lm_head"}
    assert not [name for name in found.linears if "experts" in name or "visual" in name]
    assert "model.layers.0.mlp.experts.gate_up_proj" in found.experts


def test_layers_that_predict_later_tokens_are_no_part(tmp_path: Path) -> None:
    later = {"mtp.layers.0.self_attn.q_proj.weight": (8, 8), "model.layers.2.self_attn.q_proj.weight": (8, 8)}
    make_moe(tmp_path / "with", more=later | {"mtp.fc.weight": (8, 16)})
    make_moe(tmp_path / "without")
    assert read_facts(tmp_path / "with") == read_facts(tmp_path / "without")


def test_a_tied_head_is_no_target(tmp_path: Path) -> None:
    make_moe(tmp_path, tie_word_embeddings=True)
    assert "lm_head" not in read_facts(tmp_path).linears


def test_only_routed_experts_count_as_active(tmp_path: Path) -> None:
    make_moe(tmp_path)
    found = read_facts(tmp_path)
    routed = sum(tensor.size for name, tensor in tensors().items() if ".experts." in name)
    assert found.active == found.parameters - routed * (EXPERTS - 1) // EXPERTS


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    make_moe(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(SpecError, match="quantized"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    "damage", [b"", b"\xff" * 8, np.uint64(20).tobytes() + b"{}", np.uint64(1).tobytes() + b"1"]
)
def test_a_damaged_file_is_named(damage: bytes, tmp_path: Path) -> None:
    make_moe(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(SpecError, match=r"model\.safetensors is damaged"):
        read_facts(tmp_path)


def test_directory_without_language_model_is_refused(tmp_path: Path) -> None:
    make_moe(tmp_path, vocab_size=None)
    with pytest.raises(SpecError, match="vocab_size is None"):
        read_facts(tmp_path)


def test_digest_covers_only_the_weights(tmp_path: Path) -> None:
    copy = shutil.copytree(TINY, tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps(read_json(TINY / "config.json") | {"note": 1}))
    assert weights_sha256(copy) == weights_sha256(TINY)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert weights_sha256(copy) != weights_sha256(TINY)


def test_tokens_that_stand_for_images_are_known(tmp_path: Path) -> None:
    write_base(tmp_path / "gemma", "gemma4")
    write_base(tmp_path / "mistral", "mistral3")
    assert read_facts(tmp_path / "gemma").placeholders >= {120}
    assert read_facts(tmp_path / "mistral").placeholders == {120}
    assert read_facts(TINY).placeholders == frozenset()


@pytest.mark.parametrize(("family", "is_partial"), [("phi3", True), ("olmo3", False), ("qwen3_5_moe", True)])
def test_heads_that_are_rotated_in_part_are_known(tmp_path: Path, family: str, is_partial: bool) -> None:
    write_base(tmp_path / "base", family)
    assert read_facts(tmp_path / "base").rotates_in_part is is_partial
