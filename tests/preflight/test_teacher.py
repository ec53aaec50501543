"""A teacher that is another model is looked at before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorad.adapters.peft import write_peft
from lorad.errors import SpecError
from lorad.models.directory import linear_shapes, read_config
from lorad.models.facts import read_facts
from lorad.preflight.__main__ import preflight
from lorad.spec.model import convert
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.fakes.teachers import make_teacher
from tests.kit.pool_kit import SHAPES

TAUGHT: dict[str, Any] = {"algorithm": {"name": "distill", "teacher": "teacher"}}


def refusal(cwd: Path, spec: dict[str, Any]) -> SpecError:
    with pytest.raises(SpecError) as refused:
        preflight(convert(spec), cwd=cwd)
    assert refused.value.hint
    return refused.value


def test_a_teacher_is_found_and_counted(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    facts, plain = (preflight(convert(spec), cwd=tmp_path) for spec in (TAUGHT, {}))
    assert facts.teacher_path == str(teacher) and plain.teacher_path == ""
    assert facts.memory_needed - plain.memory_needed == 4 * read_facts(teacher).parameters
    assert facts.memory_parts["bases"] == 4 * (read_facts(teacher).parameters + plain.parameters)
    assert "bases" not in preflight(convert(TAUGHT), cwd=tmp_path, warm=True).memory_parts


def test_its_adapter_must_fit_the_teacher(tmp_path: Path) -> None:
    shapes = linear_shapes(read_config(make_teacher(tmp_path / "teacher")))
    for name, of in (("its", shapes), ("other", SHAPES | {"model.layers.9.mlp.up_proj": (384, 128)})):
        (tmp_path / name).mkdir()
        write_peft(random_adapter(of, 1), tmp_path / name, "teacher")
    assert preflight(convert(TAUGHT), cwd=tmp_path, reference=tmp_path / "its").reference_parameters
    with pytest.raises(SpecError) as refused:
        preflight(convert(TAUGHT), cwd=tmp_path, reference=tmp_path / "other")
    assert refused.value.key == "algorithm.kl.reference"


def other_tokens(directory: Path) -> None:
    path = directory / "tokenizer.json"
    told = json.loads(path.read_text())
    first, second = list(told["model"]["vocab"])[10:12]
    vocab = told["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(told))


def fewer_ids(directory: Path) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"model.embed_tokens.weight": np.zeros((120, 128), np.float32)}, path)
    change_config(directory, vocab_size=120)


def shorter(directory: Path) -> None:
    change_config(directory, max_position_embeddings=64)


def damaged(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"no weights")


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_tokens, "the tokenizer of teacher has sha256"),
        (fewer_ids, "teacher has 120 token ids, builtin:tiny has 128"),
        (shorter, "it has 64 positions, a prompt and its completion take up to"),
        (damaged, "is damaged"),
    ],
)
def test_unfit_teachers_are_refused_by_key(change: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    change(make_teacher(tmp_path / "teacher"))
    error = refusal(tmp_path, TAUGHT)
    assert error.key == "algorithm.teacher" and says in error.problem


def test_missing_teacher_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, TAUGHT)
    assert error.key == "algorithm.teacher" and "teacher is not a directory" in error.problem


def test_file_settings_of_a_tokenizer_do_not_matter(tmp_path: Path) -> None:
    path = make_teacher(tmp_path / "teacher") / "tokenizer.json"
    told = json.loads(path.read_text()) | {"truncation": None, "version": "1.1"}
    path.write_text(json.dumps(told, indent=4))
    assert preflight(convert(TAUGHT), cwd=tmp_path).teacher_path


def test_its_memory_counts_beside_ranks(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    ranks = {"trainer": {"backend": "fsdp"}}
    facts, plain = (preflight(convert(spec | ranks), cwd=tmp_path) for spec in (TAUGHT, {}))
    assert facts.teacher_path == str(teacher)
    assert facts.memory_needed - plain.memory_needed == 4 * read_facts(teacher).parameters
