"""What the check says of rewards: it calls them once on made-up completions, and reads patterns."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.preflight import rewards
from lorad.preflight.__main__ import preflight
from lorad.preflight.rewards import demands
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import convert

ROW = {"prompt": "S:21=", "answer": "12", "level": 1}
CHAT = {"prompt": [{"role": "user", "content": "S:21="}], "answer": "12"}


def warnings(cwd: Path, source: str, *rows: dict[str, Any], **settings: Any) -> list[str]:
    """Return what the check says of the reward `score` of a file with this source."""
    (cwd / "mine.py").write_text(source)
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or (ROW,)))
    reward = {"name": "mine.py:score"} | settings.pop("reward", {})
    data = {"train": "rows.jsonl", "shuffle": False}
    spec = convert({"reward": reward, "data": data, "eval": {"every": 0}} | settings)
    return [text for text in preflight(spec, cwd=cwd).warnings if text.startswith(("reward", "data: row"))]


@pytest.mark.system(
    but=r"def score(completion, **row):\n    return row['grade']-mine.py:2: KeyError: 'grade'"
)
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def score(completion, **row):\n    return row['grade']", "mine.py:2: KeyError: 'grade'"),
        ("def score(completion):\n    return undefined", "mine.py:2: NameError"),
        ("def score(completion):\n    return completion[0]['content']", "mine.py:2: TypeError: string ind"),
        ("def score(completion): return completion", "returned str, not a number"),
        ("def score(completion): return float('nan')", "returned nan, not a finite number"),
        ("def score(completions): return [1.0]", "returned 1 rewards for 8 completions"),
        ("def score(completions): return 1.0", "returned float, not a list"),
        ("def score(completions): return {c: 1.0 for c in completions}", "returned dict, not a list"),
        ("import sys\ndef score(completion): sys.exit(3)", "mine.py:2: SystemExit: 3"),
        ("import os\ndef score(completion): os._exit(3)", "the reward process exited with 3"),
        (
            "def later():\n    yield 1\ndef score(completion): return later()",
            "returned generator, not a number",
        ),
    ],
)
def test_reward_that_cannot_score_is_refused(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        warnings(tmp_path, source)
    assert refused.value.key == "reward" and "docs/rewards.md" in refused.value.hint
    assert "mine.py:score fails on made-up completions of the first rows, such as '12': " in str(
        refused.value
    )
    assert says in str(refused.value)


@pytest.mark.system(but="def score(completion): return None")
@pytest.mark.parametrize(
    "source",
    [
        "def score(completion): return True",
        "def score(completion): return None",
        "def score(completion): return {'form': 0.5, 'right': None}",
        "def score(*, completion, answer, **row): return row['level'] + (completion == answer)",
        "def score(completions): return [None] * len(completions)",
        "import numpy as np\ndef score(completions): return np.ones(len(completions))",
        "import numpy as np\ndef score(completion): return np.float32(1)",
        "async def score(completion): return 1.0",
        "async def score(completions, **row): return [1.0] * len(completions)",
        "def score(completions): assert len(completions) == 8; completions.clear(); return [0] * 8",
        "import asyncio\nasync def one(): return 1.0\ndef score(completion): return asyncio.run(one())",
        "class Grader:\n    def __call__(self, completion): return 1.0\nscore = Grader()",
        "class Grader:\n    async def __call__(self, completion): return 1.0\nscore = Grader()",
    ],
)
def test_rewards_of_all_forms_pass(tmp_path: Path, source: str) -> None:
    assert warnings(tmp_path, source) == []


def test_reward_that_reads_some_completions_is_warned_of(tmp_path: Path) -> None:
    source = "import re\ndef score(completion): return float(re.search('<answer>(.*)</', completion)[1])"
    (warning,) = warnings(tmp_path, source)
    assert warning.startswith("reward: mine.py:score fails on 2 of 3 made-up completions")
    assert "mine.py:2: TypeError" in warning


def test_failures_that_are_allowed_are_warned_of(tmp_path: Path) -> None:
    (warning,) = warnings(tmp_path, "def score(): raise ValueError('no')", reward={"max_failures": 1})
    assert "fails on 3 of 3" in warning and "mine.py:1: ValueError: no" in warning


def test_reward_that_never_returns_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "_SECONDS", 0.5)
    (warning,) = warnings(tmp_path, "import time\ndef score(): time.sleep(1000)")
    assert "mine.py:score has scored no made-up completion of the first rows within 0.5 s" in warning


def test_slow_reward_that_scores_is_no_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "_SECONDS", 1.0)
    source = "import time\ndef score(completion):\n    time.sleep(1000 * (completion != '12'))\n    return 1"
    assert warnings(tmp_path, source) == []


def test_judge_that_is_down_is_refused(tmp_path: Path) -> None:
    judge = {"name": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "timeout": 0.5}
    with pytest.raises(SpecError, match=r"http://127\.0\.0\.1:1/v1 cannot be reached: Connection refused"):
        warnings(tmp_path, "", reward=judge)


def test_missing_and_null_columns_are_told(tmp_path: Path) -> None:
    source = "def score(completion, level): return float(level or 0)"
    (warning,) = warnings(tmp_path, source, ROW, ROW, ROW | {"level": None}, ROW | {"level": None})
    assert warning == ("data: row 3 (level is null) and 1 more: mine.py:score needs it, and is given None")
    with pytest.raises(SpecError, match=r"rows.jsonl:2: mine.py:score needs level, which this row does not"):
        warnings(tmp_path, source, ROW, {"prompt": "S:12=", "answer": "12"})


def test_columns_that_a_function_cannot_get_are_told(tmp_path: Path) -> None:
    row = ROW | {"finish": "in time", "completion": "a reference"}
    (warning,) = warnings(tmp_path, "def score(completion, finish): return 1.0", row)
    assert warning.startswith("reward: mine.py:score gets what lorad calls finish, not the column")


def chatty(cwd: Path) -> dict[str, Any]:
    """A model with a chat template, whose token `=` is special."""
    shutil.copytree(resolve("builtin:tiny"), cwd / "base")
    (cwd / "base/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokens = json.loads((cwd / "base/tokenizer.json").read_text())
    tokens["added_tokens"] = [token | {"special": True} for token in tokens["added_tokens"]] + [
        {
            "id": Tokenizer(cwd / "base").number_of("9"),
            "content": "9",
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
    ]
    (cwd / "base/tokenizer.json").write_text(json.dumps(tokens))
    return {"model": {"path": "./base"}}


def test_reward_of_messages_is_tried_with_them(tmp_path: Path) -> None:
    model = chatty(tmp_path)
    right = "def score(completions, **row): return [float(c[0]['content'] == 'x') for c in completions]"
    assert warnings(tmp_path, right, CHAT, **model) == []
    with pytest.raises(SpecError, match="'list' object has no attribute 'strip'"):
        text = "def score(completions, **row): return [float(c.strip() == 'x') for c in completions]"
        warnings(tmp_path, text, CHAT, **model)


def test_patterns_that_demand_left_out_text_are_told(tmp_path: Path) -> None:
    regex = {"name": "regex", "pattern": "a(9)+"}
    rollout = {"max_new_tokens": 4, "stop": ["</a>"]}
    model = chatty(tmp_path) | {"rollout": rollout}
    (warning,) = warnings(tmp_path, "", reward=regex, **model)
    assert warning.startswith("reward.pattern: 'a(9)+' matches only with the special token 9, and")
    (warning,) = warnings(tmp_path, "", reward=regex | {"pattern": r"<a>\d<\/a>$"}, **model)
    assert "matches only with '</a>' of rollout.stop" in warning and "`raw: true`" in warning
    assert warnings(tmp_path, "", reward=regex | {"raw": True}, **model) == []


@pytest.mark.parametrize(
    ("pattern", "is_demanded"),
    [
        ("<think>", True),
        (r"^\s*<think>.*?</think>", True),
        ("(?s)(?:<think>)+.*", True),
        ("(?P<a><th(?:in)k>)", True),
        ("<think>a|b<think>", True),
        (r"\<think\>", True),
        ("<think>$", True),
        ("(?<!a)<thi(?=n)nk>", True),
        ("(?x) <th ink>", True),
        ("(<think>)?a", False),
        ("<think>|a", False),
        ("<thin[k]+>", False),
        ("<thin.>", False),
        ("(?i)<THINK>", False),
        ("(?i:<think>)", False),
        ("<thin>k", False),
        ("(?!<think>)a", False),
        ("(?:<think>){0,3}", False),
    ],
)
def test_demanded_texts_are_found(pattern: str, is_demanded: bool) -> None:
    assert demands(pattern, "<think>") == is_demanded
