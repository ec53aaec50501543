"""What the preflight says of weight files is what the loader would say of them, minutes later."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.models.loading import load_base
from lorad.preflight.__main__ import preflight
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


def test_a_shard_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
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
    assert f"and {len(names[1::2])} are missing in all" in checked(directory).problem


def test_what_is_equal_or_implied_is_let_through(tmp_path: Path) -> None:
    derived = "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = {derived: torch.ones(8)}
    directory = written(tmp_path / "base", lambda t: t | more | {"lm_head.weight": t[EMBED].clone()})
    assert preflight(convert({"model": {"path": str(directory)}}), cwd=tmp_path).parameters > 0
