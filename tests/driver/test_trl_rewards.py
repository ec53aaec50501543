"""Reward functions written for TRL get what TRL 1.16.0 gives them, from the rows to the call."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lorad.driver.rewards import Rewarder, Score
from lorad.models.directory import resolve
from lorad.rl.data import Example, load_data
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.reward import RewardSpec

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
SAID = [[{"role": "assistant", "content": "3"}], [{"role": "assistant", "content": "4"}]]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
# What GRPOTrainer._calculate_rewards of TRL 1.16.0 calls a function with, for two completions of a row.
GOLDENS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"prompt": CHAT, "answer": 3, "level": "easy"},
        {"prompts": [CHAT, CHAT], "completions": SAID, "answer": [3, 3], "level": ["easy", "easy"]},
    ),
    (
        {"prompt": "4+4=", "answer": "8", "level": 2},
        {"prompts": ["4+4=", "4+4="], "completions": ["3", "4"], "answer": ["8", "8"], "level": [2, 2]},
    ),
]
SOURCE = """
import json, re

def seen(completions, **kwargs):
    print(json.dumps({"completions": completions, **kwargs}), file=open("SEEN", "w"))
    return [0.0] * len(completions)

def right(completions, answer, **kwargs):
    return [1.0 if c[0]["content"] == str(a) else 0.0 for c, a in zip(completions, answer)]

# Copyright 2020-2026 The HuggingFace Team, Apache License 2.0: trl/rewards/format_rewards.py
def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]

def alone(prompt, completion, answer):
    return float((prompt, completion, answer) == ("s:Add.\\nu:1+2=\\na:", "3", 3))
"""


def example(home: Path, row: dict[str, Any], **settings: Any) -> Example:
    """A row of a file, as a run with a chat template reads it."""
    shutil.copy(resolve("builtin:tiny") / "tokenizer.json", home)
    (home / "chat_template.jinja").write_text(TEMPLATE)
    (home / "rows.jsonl").write_text(json.dumps(row))
    tokenizer = Tokenizer(home)
    (found,) = load_data("rows.jsonl", "train", Data(**settings), tokenizer, 0, home).take(0, 1)
    tokenizer.close()
    return found


def scored(home: Path, function: str, prompt: Example, *texts: str) -> list[Score]:
    """Score completions of a prompt, which are a group."""
    (home / "mine.py").write_text(SOURCE.replace("SEEN", str(home / "seen.json")))
    with Rewarder([RewardSpec(name=f"mine.py:{function}", retries=0)], home) as rewarder:
        return rewarder.begin([[prompt.for_reward(text, "stop", [7, 8]) for text in texts]]).scores()


@pytest.mark.parametrize(("row", "golden"), GOLDENS, ids=["chat", "text"])
def test_functions_get_what_trl_gives(tmp_path: Path, row: dict[str, Any], golden: dict[str, Any]) -> None:
    scored(tmp_path, "seen", example(tmp_path, row), "3", "4")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == golden | {"completion_ids": [[7, 8]] * 2, "finish": ["stop"] * 2, "groups": [0, 0]}


def test_functions_for_trl_score_chats(tmp_path: Path) -> None:
    chat = example(tmp_path, GOLDENS[0][0])
    assert [s.value for s in scored(tmp_path, "right", chat, "3", "4", "3")] == [1.0, 0.0, 1.0]
    thought = scored(tmp_path, "think_format_reward", chat, "<think>1+2</think>3", "3")
    assert [s.value for s in thought] == [1.0, 0.0]


def test_prompts_begin_with_the_system_prompt(tmp_path: Path) -> None:
    chat = example(tmp_path, {"prompt": CHAT[1:], "answer": 3}, system="Add.")
    scored(tmp_path, "seen", chat, "3")
    assert json.loads((tmp_path / "seen.json").read_text())["prompts"] == [CHAT]


def test_functions_of_one_sample_get_text(tmp_path: Path) -> None:
    assert scored(tmp_path, "alone", example(tmp_path, GOLDENS[0][0]), "3")[0].value == 1.0


@pytest.mark.parametrize("name", ["exact_match", "regex", "math"])
def test_builtins_read_numbers_as_text(tmp_path: Path, name: str) -> None:
    spec = RewardSpec(name=name, pattern="(?P<answer>\\d)" if name == "regex" else None)
    chat = example(tmp_path, GOLDENS[0][0])
    with Rewarder([spec], tmp_path) as rewarder:
        assert rewarder.score([chat.for_reward("3", "stop", [])])[0].value == 1.0
