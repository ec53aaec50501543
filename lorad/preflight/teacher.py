"""The teacher of a distillation, where it is another model than the run's."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from lorad.bounds import JSON_BYTES
from lorad.errors import SpecError
from lorad.models.directory import read_config, read_json
from lorad.models.facts import ModelFacts, check_tensors, read_facts
from lorad.preflight.directory import check_weights, model_directory
from lorad.spec.model import Spec

_KEY = "algorithm.teacher"
_OF_IDS = ("model", "added_tokens")  # what decides in tokenizer.json which text an id stands for


class Teacher(NamedTuple):
    """A model beside the run's own."""

    directory: Path
    facts: ModelFacts


def check_teacher(spec: Spec, cwd: Path, student: Path, facts: ModelFacts) -> Teacher | None:
    """Find the teacher; None where it is the run's own model, whose directory is `student`.

    Raises SpecError for a model that cannot be read, and one whose tokens or positions are not the student's.
    """
    if (model := spec.algorithm.teacher) is None:
        return None
    try:
        directory = model_directory(model, cwd, any_architecture=False)
        check_weights(directory)
        check_tensors(directory, read_config(directory))
        teacher = read_facts(directory)
        ours = _tokens_sha256(student)
        theirs = _tokens_sha256(directory)
    except SpecError as error:
        raise SpecError(error.problem, key=_KEY, hint=error.hint) from error
    if ours != theirs:
        raise SpecError(
            f"the tokenizer of {model} has sha256 {theirs[:12]}, that of {spec.model.path} {ours[:12]}: the "
            "same ids are other texts",
            key=_KEY,
            hint="Use a teacher of the same family, with the same tokenizer.",
        )
    if teacher.vocab < facts.vocab:
        raise SpecError(
            f"{model} has {teacher.vocab} token ids, {spec.model.path} has {facts.vocab}",
            key=_KEY,
            hint="Use a teacher that knows all ids that the student may sample.",
        )
    if teacher.max_positions < facts.max_positions:
        longest = spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
        if longest > teacher.max_positions:
            raise SpecError(
                f"it has {teacher.max_positions} positions, a prompt and its completion take up to {longest}",
                key=_KEY,
                hint="Lower data.max_prompt_tokens or rollout.max_new_tokens.",
            )
    return Teacher(directory, teacher)


def _tokens_sha256(directory: Path) -> str:
    """Return the sha256 (hex) of a model's vocabulary, merges and added tokens. Raises SpecError."""
    tokenizer = read_json(directory / "tokenizer.json", JSON_BYTES)
    content = json.dumps({key: tokenizer.get(key) for key in _OF_IDS}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
