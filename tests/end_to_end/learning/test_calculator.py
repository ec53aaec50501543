"""`examples/calculator.yaml` at small size: a model that was taught to call tools has the calculator."""

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lorad.rl.tools.specs import tool_of
from tests.end_to_end.learning.test_school_maths import make_model, write
from tests.kit.world import REPOSITORY, World, world

pytestmark = pytest.mark.system

EXAMPLE = REPOSITORY / "examples" / "calculator.yaml"
TEMPLATE = """{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}\
{# <tool_call>{"name": …, "arguments": …}</tool_call> #}\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SFT = """
algorithm: sft
lora: {rank: 32, alpha: 64}
data: {train: chats.jsonl, prompts_per_step: 16}
eval: {every: 0}
trainer: {lr: 4.0e-3, steps: 30}
"""
SMALL = (
    *("trainer.backend=builtin", "rollout.backend=builtin", "data.eval=null", "eval.every=0"),
    *("data.prompts_per_step=4", "algorithm={name: grpo, group_size: 4}", "trainer.steps=2"),
    *("rollout.max_new_tokens=48", "env.turns=3", "env.max_tokens=400"),
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calculator", EXAMPLE.with_suffix(".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@contextlib.contextmanager
def calling_world() -> Iterator[World]:
    """A world with problems that one turn solves, and a model that has seen calls."""
    with world() as it:
        rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(9)]
        write(it.root / "train.jsonl", rows * 4)
        talks = [(row["prompt"], call("submit", number=int(row["answer"]))) for row in rows]
        talks += [("submitted", "yes")]
        chats = [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in talks
        ]
        write(it.root / "chats.jsonl", chats * 8)
        make_model(it.root / "model", ["user\nassistant\ntool\n<calculate><submit>", *map(" ".join, talks)])
        path = it.root / "model" / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
        yield it


def tuned(made: World) -> tuple[str, ...]:
    """Teach the model to call tools; returns what a run on top of it is given."""
    model = f"model.path={made.root / 'model'}"
    run = made.run("tuned", model, text=SFT)
    made.lorad("export", f"tuned@{run.version}", made.root / "adapter")
    data = (f"data.train={made.root / 'train.jsonl'}", f"lora.adapter_path={made.root / 'adapter'}")
    return (model, *data, "lora.rank=32", "lora.alpha=64", *SMALL)


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with calling_world() as it:
        yield it


def test_calculator_calculates(script: ModuleType) -> None:
    one = script.Calculator()
    one.reset(**next(script.rows(1, 0)))
    assert one.calculate("(12 + 30) * -4 / 2") == "-84" and one.get_reward() == 0.0
    for wrong in ("2 ** 9", "__import__('os')", "1 / 0", "9" * 101, "99999999 * 99999999"):
        with pytest.raises((ValueError, ZeroDivisionError)):
            one.calculate(wrong)
    described = [tool_of(tool)["function"] for tool in (one.calculate, one.submit)]
    assert [tool["name"] for tool in described] == ["calculate", "submit"] and all(
        tool["description"] for tool in described
    )


def test_problems_have_their_answers(script: ModuleType, tmp_path: Path) -> None:
    script.main(str(tmp_path))
    train, test = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert len(test) == 256 and not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    for row in train[:50]:
        a, b, c = (int(word) for word in row["prompt"].replace(",", "").split() if word.isdigit())
        assert 2 * int(row["answer"]) == a + b * c


def test_example_runs_with_a_small_model(made: World) -> None:
    env = f"env.name={EXAMPLE.with_suffix('.py')}:Calculator"
    made.lorad("run", EXAMPLE, *tuned(made), env, "--name", "plays", "--wait")
    metrics = made.client.steps("plays")[-1].metrics
    assert (metrics["tool_calls"] or 0) > 0.3 and metrics["tool_errors"] is not None
    samples = made.client.samples("plays", step=2)
    called = [turn for sample in samples for turn in sample.turns if turn.calls]
    assert any(turn.observation == "tool: submitted" for turn in called)
    assert max(sample.reward or 0.0 for sample in samples) == 1.0
    assert "0 differ" in made.lorad("replay", "plays").stderr
