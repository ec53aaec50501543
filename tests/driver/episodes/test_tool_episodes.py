"""Tools in episodes, from what the model samples to what is kept of a step."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.driver.driven import Driven
from tests.kit.pool_kit import TINY, Running, running_pool

TEMPLATE = """{# <tool_call> #}{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}
{%- for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == "assistant" %}<eos>{% endif %}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""
ENVS = """
class Counter:
    def reset(self, **row):
        self.count = 0
        return " begin."

    def increment(self, step: int) -> int:
        '''Count on.

        Args:
            step: how far
        '''
        if step > 2:
            raise ValueError("too far")
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count)
"""
HOW = (
    *("data={train: rows.jsonl, shuffle: false}", "env={name: 'envs.py:Counter', turns: 3}"),
    *("rollout={max_new_tokens: 6, temperature: 2}", "trainer.steps=2", "lora.dropout=0", "eval.every=0"),
)


def call(step: int) -> str:
    return f'<tool_call>{{"name": "increment", "arguments": {{"step": {step}}}}}</tool_call>'


def write_model(directory: Path) -> Path:
    """builtin:tiny with a chat template, and a tokenizer in which every sign but letters is a call or tries
    to be one.
    """
    shutil.copytree(TINY, directory)
    made = json.loads((TINY / "tokenizer.json").read_text())
    vocab = made["model"]["vocab"]
    signs = [sign for sign in vocab if len(sign) == 1 and sign not in " :;.\n_" and not sign.islower()]
    texts = {
        sign: (call(i // 2 % 4) if i % 2 else "<tool_call>{</tool_call>") + " " * i  # a token for each
        for i, sign in enumerate(signs)
    }
    made["model"]["vocab"] = {texts.get(text, text): number for text, number in vocab.items()}
    (directory / "tokenizer.json").write_text(json.dumps(made))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


def step_of(running: Running, home: Path, *, is_free: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Drive a run in `home`; returns the samples and metrics of its first step."""
    (home / "envs.py").write_text(ENVS)
    (home / "rows.jsonl").write_text("".join(f'{{"prompt": "count {c}."}}\n' for c in "abcd"))
    model = write_model(home / "model")
    how = *HOW, f"model.path={model}", f"deterministic={str(not is_free).lower()}"
    run = Driven(running, home, f"tools-{is_free}", *how)
    end = run.drive()
    assert end.reason == "completed", end
    fact = run.facts("step")[0].data
    lines = (run.run.root / fact["samples"]).read_text().splitlines()
    return [msgspec.json.decode(line) for line in lines], fact["metrics"]


# tools are called by the same code there, and test_free_episodes.py has how they are played
@pytest.mark.parametrize("is_free", [False, pytest.param(True, marks=pytest.mark.long)])
def test_calls_are_made_answered_and_counted(running: Running, tmp_path: Path, is_free: bool) -> None:
    samples, metrics = step_of(running, tmp_path, is_free=is_free)
    turns = [turn for sample in samples for turn in sample["turns"]]
    calls = [one for turn in turns for one in turn["calls"]]
    assert {one["outcome"] for one in calls} == {"ok", "invalid_json"}
    answered = "".join(turn["observation"] for turn in turns)
    assert "cannot be read" in answered and "too far" in answered
    assert samples[0]["prompt"].startswith("increment;u:count ")
    for sample in samples:
        made = [one for turn in sample["turns"] for one in turn["calls"] if one["outcome"] == "ok"]
        assert sample["reward"] == sum(one["arguments"]["step"] % 3 for one in made)
    assert metrics["tool_calls"] == len(calls) / len(samples)
    assert metrics["tool_errors"] == sum(turn["tool_errors"] for turn in turns) / len(samples) > 0
    assert {sample["end"] for sample in samples} >= {"length", "done"}
