"""Evaluations from the command line: kept completions, the best version, a version on rows of one's own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.rl.tasks import problem
from tests.kit.world import World, world

pytestmark = pytest.mark.system

SPEC = """
seed: 3
lora: {rank: 8, alpha: 16}
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 2.0e-3, steps: 6}
rollout: {max_new_tokens: 12}
eval: {every: 2, problems: 8, sets: {warm: {data: sort, n: 4, temperature: 0.8, problems: 6}}}
checkpoint: {every: 2, keep: 1, keep_best: 1, best_by: eval/warm, keep_versions: 1, keep_evals: 2}
expect: [{metric: eval/warm, low: 0.0, source: this test}, {metric: reward, step: 2, low: 2.0}]
"""

SOURCES = """
lora: {rank: 8}
algorithm: {group_size: 4}
data:
  prompts_per_step: 4
  chat_template: never
  train: {store.jsonl: {env: {name: lookup, turns: 3}}, sized.jsonl: {reward: "size.py:size"}, plain.jsonl: 1}
  eval: {store.jsonl: {env: {name: lookup, turns: 2}}}
trainer: {steps: 1}
rollout: {max_new_tokens: 12}
"""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        it.run("sorter", text=SPEC)
        yield it


def best(made: World) -> tuple[int, float]:
    scores = {e.version: e.sets["warm"].score or 0.0 for e in made.client.evals("sorter")}
    return max(scores.items(), key=lambda one: (one[1], -one[0]))


def test_best_version_has_a_name_and_stays(made: World) -> None:
    number, score = best(made)
    shown = made.client.show("sorter").best
    assert shown is not None and (shown.version, shown.value, shown.metric) == (number, score, "eval/warm")
    made.lorad("export", "sorter@best", made.root / "best")
    assert made.client.pin("sorter@best").version == number
    made.client.unpin("sorter@best")
    made.lorad("gc")
    assert number in {v.version for v in made.client.adapters("sorter") if v.path}
    assert "warm: " in made.lorad("show", "sorter").stdout


def test_expected_figures_are_shown(made: World) -> None:
    shown = made.lorad("show", "sorter").stdout
    warm, reward = made.json("show", "sorter")["expected"]
    assert (warm["outcome"], warm["step"], reward["outcome"]) == ("met", 6, "missed")
    assert "at 6, expected at least 0 (this test)" in shown and "expected at least 2" in shown


def test_one_problem_is_shown_step_by_step(made: World) -> None:
    rows = made.json("samples", "sorter", "--eval", "warm", "--prompt", 2)
    assert [row["step"] for row in rows] == [4] * 4 + [6] * 4
    assert len({row["prompt_id"] for row in rows}) == 1 and {row["problem"] for row in rows} == {2}
    assert len(made.json("samples", "sorter", "--eval", "main", "--step", 4)) == 8
    assert "Its sets: main, warm." in made.lorad("samples", "sorter", "--eval", "cold", expect=3).stderr
    assert "from 1 to 6" in made.lorad("samples", "sorter", "--eval", "warm", "-p", 7, expect=3).stderr


def test_version_on_rows_equals_the_run(made: World) -> None:
    last = made.client.evals("sorter")[-1]
    same = ("--problems", 6, "-n", 4, "--temperature", 0.8)
    result = made.json("eval", f"sorter@{last.version}", "sort", *same)
    assert result["metrics"] == {"score": last.sets["warm"].score} | last.sets["warm"].passed
    assert result["sha256"] == made.client.adapters("sorter")[-1].sha256
    (kept,) = made.client.results("sorter")
    assert kept.metrics == result["metrics"] and kept.settings["n"] == 4
    assert "sort " in made.lorad("adapters", "sorter").stdout


def test_rows_and_reward_may_be_of_ones_own(made: World) -> None:
    Path(made.root, "rows.jsonl").write_text(json.dumps({"question": "S:21=", "answer": "12"}) + "\n")
    Path(made.root, "size.py").write_text("def size(completion):\n    return float(len(completion))\n")
    own = ("--prompt-key", "question", "--reward", "size.py:size", "--out", "got.jsonl")
    result = made.json("eval", "sorter", "rows.jsonl", *own)
    (line,) = map(json.loads, Path(made.root, "got.jsonl").read_text().splitlines())
    assert result["metrics"] == {"score": len(line["completion"])} and line["answer"] == "12"


def test_rows_of_a_source_keep_their_judge(made: World) -> None:
    rows = [problem("lookup", "train", 0, number) for number in range(4)]
    lines = [json.dumps({"prompt": row.prompt, "answer": row.answer}) for row in rows]
    for name in ("store", "sized", "plain"):
        Path(made.root, f"{name}.jsonl").write_text("\n".join(lines))
    Path(made.root, "size.py").write_text("def size(completion):\n    return float(len(completion))\n")
    made.run("mixed", text=SOURCES)
    last = made.client.evals("mixed")[-1]
    of_run = made.json("eval", f"mixed@{last.version}", "store.jsonl")
    assert of_run["settings"]["env"] == "lookup" and of_run["metrics"]["score"] == last.score
    sized = made.json("eval", "mixed", made.root / "sized.jsonl", "--out", "got.jsonl")
    assert sized["settings"]["reward"][0]["name"] == "size.py:size"
    got = Path(made.root, "got.jsonl").read_text().splitlines()
    sizes = [len(json.loads(line)["completion"]) for line in got]
    assert sized["metrics"]["score"] == sum(sizes) / 4 > 0
    for given in (("plain.jsonl",), ("sized.jsonl", "--reward", "exact_match")):
        judged = made.json("eval", "mixed", *given)["settings"]
        assert judged["reward"][0]["name"] == "exact_match" and "env" not in judged


def test_an_answered_prompt_is_shown(made: World) -> None:
    chat = [{"role": "user", "content": "S:21="}, {"role": "assistant", "content": "It is 12"}]
    Path(made.root, "answered.jsonl").write_text(json.dumps({"prompt": chat, "answer": "12"}) + "\n")
    error = made.lorad("eval", "sorter", "answered.jsonl").stderr
    assert "warning: data: row 1 (“It is 12”): the prompt ends with a turn of the assistant's" in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("sort", "-n", 4), "--n: 4 completions at temperature 0 are all the same"),
        (("none.jsonl",), "there is no file"),
        (("sort", "--reward", "nope"), "there is no builtin 'nope'"),
        (("--suite", "helm:x"), "'helm:x' is no suite"),
        (("--suite", "lm_eval:x", "-n", 4), "--n: a suite has its own"),
        (("--suite", "lm_eval:x"), "has no lm_eval"),
        (("--suite", "inspect:x.py", "--python", "/bin/false"), "has no inspect_ai"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(made: World, arguments: tuple[object, ...], told: str) -> None:
    assert told in made.lorad("eval", "sorter", *arguments, expect=2).stderr
