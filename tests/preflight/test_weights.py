"""What the preflight says of weight files is what the loader would say of them, minutes later."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lorad.backends.setup import adapter_config
from lorad.box.config import Config
from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.models.loading import load_base
from lorad.preflight.__main__ import _model_facts, preflight
from lorad.preflight.trainers import check_names
from lorad.spec.model import convert

Tensors = dict[str, torch.Tensor]
Q, EMBED = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
FP8 = torch.float8_e4m3fn


def fuse(tensors: Tensors) -> Tensors:
    parts = [tensors.pop(Q.replace("q_proj", name)) for name in ("q_proj", "k_proj", "v_proj")]
    return tensors | {Q.replace("q_proj", "qkv_proj"): torch.cat(parts)}


CHANGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "tower": (
        lambda t: {n.replace("model.", "model.language_model.", 1): x for n, x in t.items()},
        "no tensor model.embed_tokens.weight",
    ),
    "fused": (fuse, f"no tensor {Q}, and 3 are missing in all"),
    "mtp": (
        lambda t: t | {"mtp.fc.weight": torch.ones(4, 4)},
        r"1 tensors have no place .*: mtp\.fc\.weight",
    ),
    "visual": (lambda t: t | {"visual.blocks.0.weight": torch.ones(4)}, "1 tensors have no place"),
    "missing": (
        lambda t: {n: x for n, x in t.items() if n != "model.norm.weight"},
        "no tensor model.norm.weight",
    ),
    "shape": (lambda t: t | {EMBED: t[EMBED][:-1]}, r"has shape \(127, 128\), config.json says \(128, 128\)"),
    "fp8": (lambda t: t | {Q: t[Q].to(FP8)}, "holds F8_E4M3: quantized weights cannot be trained on"),
    "int8": (lambda t: t | {Q: t[Q].to(torch.int8)}, "holds I8: quantized"),
    "int4": (lambda t: {n.replace("q_proj.weight", "q_proj.qweight"): x for n, x in t.items()}, "no tensor"),
    "head": (lambda t: t | {"lm_head.weight": t[EMBED] + 1}, r"lm_head\.weight differs from model\.embed"),
}


def written(directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    shutil.copytree(resolve("builtin:tiny"), directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: tensor.contiguous() for name, tensor in change(tensors).items()},
        directory / "model.safetensors",
    )
    return directory


def checked(directory: Path, **spec: Any) -> SpecError:
    with pytest.raises(SpecError) as refused:
        preflight(convert({"model": {"path": str(directory)}} | spec), cwd=directory)
    return refused.value


@pytest.mark.parametrize("name", CHANGES)
def test_the_check_refuses_as_the_loader_would(name: str, tmp_path: Path) -> None:
    change, says = CHANGES[name]
    directory = written(tmp_path / "base", change)
    with pytest.raises(SpecError, match=says) as late:
        load_base(directory, torch.float32, torch.device("cpu"))
    early = checked(directory)
    assert (early.problem, early.hint) == (late.value.problem, late.value.hint)
    teacher = checked(
        resolve("builtin:tiny"), algorithm={"name": "distill", "kl": {"coef": 1}, "teacher": str(directory)}
    )
    assert (teacher.key, teacher.problem) == ("algorithm.teacher", early.problem)


def test_a_copy_of_another_shard_is_refused(tmp_path: Path) -> None:
    directory = written(tmp_path / "base", lambda tensors: tensors)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for name, some in halves.items():
        save_file({key: tensors[key] for key in some}, directory / name)
    index = {"weight_map": {key: name for name, some in halves.items() for key in some}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert preflight(convert({"model": {"path": str(directory)}}), cwd=tmp_path).parameters > 0
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")
    count = len(names[1::2])
    lost = f"b.safetensors lacks {names[1]}, and {count} of the {count} tensors that model.safetensors.index"
    assert lost in checked(directory).problem


@pytest.mark.parametrize("backend", ["builtin", "fsdp"])
def test_a_tensor_of_two_shards_is_refused(backend: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "base", lambda tensors: tensors)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "a.safetensors")
    save_file({Q: torch.zeros_like(tensors[Q])}, directory / "b.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {Q: "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    early = checked(directory, trainer={"backend": backend}, rollout={"backend": "vllm"})
    assert early.problem == f"{directory}/a.safetensors and b.safetensors both hold {Q}" and early.hint
    with pytest.raises(SpecError, match=r"a\.safetensors and b\.safetensors both hold"):
        load_base(directory, torch.float32, torch.device("cpu"))


def test_what_is_equal_or_implied_is_let_through(tmp_path: Path) -> None:
    derived = "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = {derived: torch.ones(8)}
    directory = written(tmp_path / "base", lambda t: t | more | {"lm_head.weight": t[EMBED].clone()})
    assert preflight(convert({"model": {"path": str(directory)}}), cwd=tmp_path).parameters > 0


TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IN_TOWER = {"text_config": TEXT, "vision_config": TOWER | {"model_type": "siglip_vision_model"}}
FUSED = {key: value for key, value in TEXT.items() if key != "head_dim"} | {"pad_token_id": 0}


def foreign(
    directory: Path, prefix: str, linears: dict[str, tuple[int, int]], config: dict[str, Any]
) -> Path:
    """Write linears of an architecture that lorad does not compute itself."""
    shutil.copytree(resolve("builtin:tiny"), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    (directory / "config.json").write_text(json.dumps(config))
    names = [f"{prefix}layers.{layer}.{name}.weight" for layer in range(2) for name in linears]
    save_file(
        {name: torch.zeros(shape) for name, shape in zip(names, [*linears.values()] * 2, strict=True)},
        directory / "model.safetensors",
    )
    return directory


def saved(directory: Path, config: dict[str, Any], *, lacks: str = "") -> Path:
    """Write a checkpoint as the hub has it, without one of its tensors."""
    shutil.copytree(resolve("builtin:tiny"), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    made = AutoConfig.for_model(**config)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    named = {re.sub(r"^model\.language_model\.", "language_model.model.", name): name for name in tensors}
    left = {new: tensors[name] for new, name in named.items() if name != lacks}
    save_file(left, directory / "model.safetensors", {"format": "pt"})
    return directory


QUERY = {"self_attn.q_proj": (32, 32)}


GEMMA = {"model_type": "gemma3", **IN_TOWER}
PHI = {"model_type": "phi3", **FUSED, **dict.fromkeys(("bos_token_id", "eos_token_id"), 0)}


@pytest.mark.system
@pytest.mark.parametrize(
    ("config", "lacks", "says"),
    [
        (GEMMA, "", ""),
        (PHI, "", ""),
        (PHI, "model.norm.weight", r"no tensor model\.norm\.weight, and 1 are missing in all"),
    ],
)
def test_fsdp_is_asked_for_names(config: dict[str, Any], lacks: str, says: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "base", config, lacks=lacks)
    spec = convert({"trainer": {"backend": "fsdp"}, "rollout": {"backend": "vllm"}})
    facts = read_facts(directory)
    asked = partial(check_names, spec, facts, adapter_config(spec, facts), directory, Config(), "cpu")
    if not says:
        assert asked() == []
        return
    with pytest.raises(SpecError, match=says) as refused:
        asked()
    assert refused.value.key == "model.path" and refused.value.hint


@pytest.mark.system
@pytest.mark.parametrize(("kind", "says"), [("vit", r"AutoModelForCausalLM\.$"), ("mix_moe", "`mix_moe`")])
def test_fsdp_refuses_what_transformers_does(kind: str, says: str, tmp_path: Path) -> None:
    directory = foreign(tmp_path / "base", "model.", QUERY, TEXT | {"model_type": kind})
    error = checked(directory, trainer={"backend": "fsdp"}, rollout={"backend": "vllm"})
    assert re.search(says, error.problem) and error.hint and error.key == "model.path"


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_known_models_are_whole_for_every_trainer(trainer: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "base", CHANGES["missing"][0])
    spec = convert({"trainer": {"backend": trainer}, "rollout": {"backend": "vllm"}})
    with pytest.raises(SpecError, match=r"no tensor model\.norm\.weight, and 1 are missing in all"):
        _model_facts(spec, directory)


def test_servers_without_a_place_for_linears_are_named(tmp_path: Path) -> None:
    directory = foreign(tmp_path / "base", "model.", QUERY, TEXT | {"model_type": "llama4"})
    error = checked(directory, trainer={"backend": "fsdp"}, rollout={"backend": "vllm"})
    assert error.problem.startswith("vllm takes no adapters on q_proj of llama4: ")
    assert error.key == "lora.target_modules" and '["q_proj"]' in error.hint
