"""What `lorad init` writes fits the base and the data that it is given."""

import pytest

from lorad.rl import tasks
from lorad.spec.templates import TASKS, TEMPLATES
from lorad.spec.text import load_spec


def test_the_tasks_are_those_there_are() -> None:
    assert set(TASKS) == {*tasks.TASKS}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("model", [None, "/models/mine"])
@pytest.mark.parametrize(("data", "evaluates"), [("sort", True), ("rows.jsonl", False), (None, None)])
def test_templates_fit_what_they_are_for(
    name: str, model: str | None, data: str | None, evaluates: bool | None
) -> None:
    text = TEMPLATES[name].filled(model=model, data=data)
    spec = load_spec(text)
    assert spec.model.path == model or model is None
    assert evaluates in (None, "\neval: " in text)
    is_tiny = spec.model.path == "builtin:tiny"
    assert (spec.trainer.lr is not None) == is_tiny
    assert (spec.rollout.max_new_tokens < 256) == is_tiny
    assert is_tiny or "lr: what fits the model" in text
