"""`lorad try SPEC --rewards`: rewards alone, on completions that are there, without a model."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lorad.client.evaluate import Grading
from lorad.errors import SpecError
from lorad.evaluation.grade import grade
from lorad.records.samples import Sample
from lorad.spec.model import convert, to_json
from tests.kit.world import SMALL, World, world

CHAT = [{"role": "user", "content": "5+7="}]
REWARDS = """
def tags(completion, level=0):
    return {"open": completion.count("<a>"), "level": level}
def best(completions, answer):
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [float(len(text) == max(map(len, texts)) and text == str(a)) for text, a in zip(texts, answer)]
def prompted(prompt, completion):
    return 1.0 / len(completion)
"""


def graded(home: Path, *lines: Any, n: int | None = None, reward: Any = "mine.py:best") -> list[Sample]:
    """What rewards of a spec make of lines."""
    (home / "mine.py").write_text(REWARDS)
    spec = json.loads(to_json(convert({"reward": reward})))
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return grade(Grading(spec=spec, cwd=str(home), lines=text, n=n)).samples


def test_lines_have_rewards_and_their_components(tmp_path: Path) -> None:
    line = {"prompt": CHAT, "answer": 12, "level": 3, "completion": "<a>"}
    rewards = ["exact_match", {"name": "mine.py:tags", "weight": 0.5}]
    (found,) = graded(tmp_path, line, reward=rewards)
    parts = {"exact_match": 0.0, "tags": 4.0, "tags/open": 1.0, "tags/level": 3.0}
    assert (found.reward, found.rewards) == (2.0, parts)
    assert (found.prompt, found.answer, found.completion, found.error) == ("5+7=", "12", "<a>", None)


def test_completions_of_one_prompt_are_a_group(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "answer": 12, "completion": text} for text in ("12", "123")]
    several = {"prompt": "1+1=", "answer": "2", "completions": ["2", "3"]}
    assert [s.reward for s in graded(tmp_path, *rows, "", several)] == [0.0, 0.0, 1.0, 0.0]
    assert [s.reward for s in graded(tmp_path, rows[0], several, n=1)] == [1.0]


def test_failed_function_says_why_of_its_line(tmp_path: Path) -> None:
    good, bad = graded(
        tmp_path, *[{"prompt": "x", "completion": c} for c in ("ab", "")], reward="mine.py:prompted"
    )
    assert good.reward == 0.5 and bad.reward is None
    assert "mine.py:8: ZeroDivisionError" in str(bad.error)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["", "{"], "<stdin>:2: not JSON"),
        (["[1]"], "<stdin>:1: not a JSON object"),
        ([{"prompt": "x"}], "<stdin>:1: it has no completion that is text; there is prompt"),
        ([{"completion": CHAT}], "<stdin>:1: it has no completion that is text"),
        ([{"completion": "x", "answer": "x", "finish": "eos"}], "<stdin>:1: finish is 'eos'"),
        (
            [{"completion": "x", "answer": ""}, {"completion": "x"}],
            "needs answer, which <stdin>:2 does not have",
        ),
        ([{"completion": "x", "answer": "x", "prompt": [7]}], "<stdin>:1: message 1 of the prompt is int"),
        ([], "there are 0 completions"),
        ([{"completions": ["x"] * 10_001}], "there are 10001 completions, not 1 to 10,000"),
    ],
)
def test_bad_lines_are_refused_by_place(tmp_path: Path, lines: list[Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        graded(tmp_path, *lines)
    assert says in str(refused.value) and refused.value.hint


def test_prompts_that_functions_need_are_missed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="needs prompt, which <stdin>:1 does not have"):
        graded(tmp_path, {"completion": "x"}, reward="mine.py:prompted")


def test_episodes_are_not_graded(tmp_path: Path) -> None:
    spec = json.loads(to_json(convert({"env": {"name": "lookup"}, "data": {"train": "lookup"}})))
    with pytest.raises(SpecError, match="episodes of lookup have the reward"):
        grade(Grading(spec=spec, cwd=str(tmp_path), lines='{"completion": "x"}'))


def piped(made: World, *arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    """`lorad try spec.yaml` with lines on stdin."""
    command = [*made.python, "-m", "lorad", "try", "spec.yaml", *arguments]
    where: dict[str, Any] = {"env": made.environment, "cwd": made.root, "errors": "surrogateescape"}
    return subprocess.run(command, input=lines, capture_output=True, timeout=300, **where)


@pytest.mark.system
def test_saved_samples_and_stdin_are_graded() -> None:
    with world() as made:
        (made.root / "mine.py").write_text(REWARDS)
        rows = [{"prompt": f"S:{n}=", "answer": n, "level": n} for n in range(8)]
        (made.root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        made.spec(SMALL)
        line = json.dumps({"completion": "12", "answer": 12, "prompt": "x"})
        alone = piped(made, "--rewards", "-", "reward=mine.py:best", lines=line)
        assert alone.returncode == 0 and "mean reward 1.000" in alone.stderr
        assert not made.home.root.exists()  # nobody was asked for it

        overrides = ("data.train=rows.jsonl", "trainer.steps=2", "reward=mine.py:tags")
        made.run("first", *overrides)
        saved = made.client.samples("first", step=1)
        found = made.json("try", "spec.yaml", "--rewards", "first", "--step", 1, "reward=mine.py:tags")[
            "samples"
        ]
        assert [s["completion"] for s in found] == [s.completion for s in saved]
        assert [s["reward"] for s in found] == [s.reward for s in saved]
        assert {s["rewards"]["level"] for s in found} == {float(str(s.answer)) for s in saved}

        for others in (rows[:1], [row | {"answer": 99} for row in rows]):
            (made.root / "rows.jsonl").write_text("\n".join(map(json.dumps, others)))
            changed = made.lorad("try", "spec.yaml", "--rewards", "first", expect=2)
            assert "data.train: the data of first have changed" in changed.stderr
        for of, says in (("rows.jsonl", "is a file, not a run"), ("none", "no run named none")):
            assert says in piped(made, "--rewards", of).stderr
        assert "only samples of a run" in piped(made, "--rewards", "-", "--step", "1", lines=line).stderr
        assert "<stdin>:1: not UTF-8" in piped(made, "--rewards", "-", lines="\udcff").stderr
