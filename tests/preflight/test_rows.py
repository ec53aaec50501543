"""What the preflight says of rows that can be read and are probably not meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorad.errors import SpecError
from lorad.preflight.__main__ import preflight
from lorad.spec.model import convert

ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = [ASKED, {"role": "assistant", "content": f"{'well, ' * 10}it is\n4."}]
ENDS = "well, well, well, well, well, it is 4."


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": row, "answer": "4"}) + "\n" for row in rows))
    return path.name


def told(cwd: Path, spec: dict[str, Any]) -> list[str]:
    warnings = preflight(convert({"eval": {"every": 0}} | spec), cwd=cwd).warnings
    return [text.partition(": the prompt")[0] for text in warnings if "turn of the assistant's" in text]


def test_prompts_with_an_answer_are_counted(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", "2+2?", ANSWERED, [ASKED], ANSWERED, ANSWERED)
    (warning,) = told(tmp_path, {"data": {"train": rows}})
    assert warning.startswith("data.train: row 2 (“…") and warning.endswith(f"{ENDS}”) and 2 more")
    other = write(tmp_path / "other.jsonl", "2+2?")
    assert "row 2 of rows.jsonl (" in told(tmp_path, {"data": {"train": [other, rows]}})[0]
    assert told(tmp_path, {"data": {"train": other}}) == []


def test_rows_of_evaluations_are_looked_at(tmp_path: Path) -> None:
    train = write(tmp_path / "rows.jsonl", [ASKED])
    held_out = write(tmp_path / "eval.jsonl", [ASKED], ANSWERED)
    sets = {"every": 1, "sets": {"hard": {"data": held_out}}}
    warnings = told(tmp_path, {"data": {"train": train, "eval": held_out}, "eval": sets})
    assert [warning.partition(" (")[0] for warning in warnings] == [
        "data.eval: row 2",
        "eval.sets.hard.data: row 2",
    ]


def warned(cwd: Path, data: dict[str, Any], **spec: Any) -> list[str]:
    facts = preflight(convert({"data": data, "eval": {"every": 1}} | spec), cwd=cwd)
    return [text.partition(":")[2].strip() for text in facts.warnings if text.startswith(("data.", "eval."))]


def test_evaluating_what_is_trained_on_is_doubted(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", "2+2?", "2+3?")
    other = write(tmp_path / "other.jsonl", "3+3?")
    sentence = "./rows.jsonl is trained on, so that its rows are not held out"
    data = {"train": [rows, other], "eval": f"./{rows}"}
    assert warned(tmp_path, data) == [sentence]
    sets = {"every": 1, "sets": {"same": {"data": f"./{rows}"}, "sort": {"data": "sort"}}}
    assert warned(tmp_path, {"train": rows, "eval": other}, eval=sets) == [sentence]
    assert warned(tmp_path, {"train": rows, "eval": other}) == []


PAIRS = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
NOTHING = "nothing is measured of them"


@pytest.mark.parametrize(
    ("algorithm", "train", "held_out", "ends"),
    [
        ("dpo", PAIRS, {"prompt": "2+3?"}, [NOTHING]),
        ("dpo", PAIRS, {"prompt": "2+3?", "completion": "5"}, [NOTHING]),
        ("dpo", PAIRS, {"prompt": "2+3?", "answer": "5"}, []),
        ("dpo", PAIRS, PAIRS, []),
        ("sft", {"prompt": "2+2?", "completion": "4"}, {"prompt": "2+3?"}, [NOTHING]),
        ("grpo", {"prompt": "2+2?", "answer": "4"}, {"prompt": "2+3?", "answer": "5"}, []),
    ],
)
def test_held_out_rows_without_figures_are_doubted(
    algorithm: str, train: dict[str, str], held_out: dict[str, str], ends: list[str], tmp_path: Path
) -> None:
    for name, row in (("rows.jsonl", train), ("eval.jsonl", held_out)):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    data = {"train": "rows.jsonl", "eval": "eval.jsonl"}
    warnings = [
        text for text in warned(tmp_path, data, algorithm=algorithm) if "eval" in text or NOTHING in text
    ]
    assert [text.rpartition(", so that ")[2] for text in warnings] == ends


LONG = "What is two and two?"
TIED = {"prompt": "2+2?", "chosen": "4", "rejected": "4"}
EQUAL = "are the same tokens, so that neither is preferred"


@pytest.mark.parametrize(
    ("row", "data", "words", "says"),
    [
        (TIED, {}, "“4”", EQUAL),
        (
            PAIRS | {"chosen": "44445", "rejected": "44446"},
            {"max_sample_tokens": 8},
            "“44445”",
            "up to data.max",
        ),
        (PAIRS | {"chosen": "5", "rejected": "4"}, {}, "“5”", "a row before it prefers the opposite"),
        (
            PAIRS | {"score_chosen": 1, "score_rejected": 2.5},
            {},
            "score_chosen 1, score_rejected 2.5",
            "swapped",
        ),
        (PAIRS | {"prompt": LONG, "rejected": f"{LONG} 5"}, {}, "rejected", "a second time"),
        (PAIRS | {"chosen": " "}, {}, "chosen", "says nothing"),
    ],
)
def test_pairs_that_teach_little_are_doubted(
    row: dict[str, Any], data: dict[str, Any], words: str, says: str, tmp_path: Path
) -> None:
    rows = [PAIRS, PAIRS | {"chosen": "6"}, row, row]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "rows.jsonl", "eval": "rows.jsonl", "too_long": "truncate", **data}
    trained, held_out, _ = sorted(
        warned(tmp_path, data, algorithm="dpo"), key=lambda text: "trained on" in text
    )
    assert trained == held_out and trained.startswith(f"row 3 ({words}) and 1 more: ") and says in trained


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "apo_zero", "simpo", "sigmoid_norm"])
def test_preferences_without_two_sides_are_refused(loss: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps(TIED) + "\n"))
    algorithm = {"name": "dpo", "preference": {"loss": loss}}
    with pytest.raises(SpecError, match=EQUAL) as refused:
        warned(tmp_path, {"train": "rows.jsonl"}, algorithm=algorithm)
    assert refused.value.key == "data.train" and "data.chosen_key is chosen" in str(refused.value.hint)


def test_labels_that_do_not_differ_are_doubted(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2?", "completion": text, "label": True} for text in "45"]
    data, algorithm = {"train": "rows.jsonl"}, {"name": "dpo", "preference": {"loss": "kto"}}
    for other, ends in (
        ({}, "no completion is told from another"),
        ({"label": False}, "leave one of them out"),
    ):
        lines = [*rows, rows[0] | other]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        (warning,) = [text for text in warned(tmp_path, data, algorithm=algorithm) if text.endswith(ends)]
        assert "label is true" in warning or warning.startswith("row 3 (“4”)")


def test_empty_answers_are_doubted_beside_exact_match(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2?", "answer": answer} for answer in ("4", "", " ")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "rows.jsonl", "eval": "sort"}
    (warning,) = warned(tmp_path, data)
    assert warning == (
        "row 2 (an empty answer) and 1 more: exact_match compares completions with it; leave the row out"
    )
    assert warned(tmp_path, data, reward={"name": "regex", "pattern": "4"}) == []


NAN = float("nan")
RAISE = "raise rollout.max_new_tokens"


@pytest.mark.parametrize(
    ("answer", "reward", "rollout", "begins", "ends"),
    [
        (NAN, "exact_match", {}, "NaN", "leave the row out"),
        (NAN, "gsm8k", {}, "NaN", "leave the row out"),
        (["4"], "exact_match", {}, '“["4"]”', "a function of yours"),
        ("about five", "gsm8k", {}, "“about five”", "a number"),
        ("so #### 5-6", "gsm8k", {}, "“so #### 5-6”", "a number"),
        ("4<eos>", "exact_match", {}, "<eos>", "out of the answer"),
        ("4;5", "exact_match", {"stop": [";"]}, "“;”", "another stop"),
        ("1" * 16, "exact_match", {}, "16 tokens", RAISE),
        ("1" * 17, {"name": "regex", "pattern": "<(?P<answer>.*)>"}, {}, "17 tokens", RAISE),
    ],
)
def test_answers_that_no_completion_has_are_doubted(
    answer: Any, reward: Any, rollout: dict[str, Any], begins: str, ends: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "2+2?", "answer": text} for text in ("4", answer, answer)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "rows.jsonl", "eval": "sort"}
    (warning,) = warned(tmp_path, data, reward=reward, rollout=rollout)
    assert warning.startswith(f"row 2 ({begins}) and 1 more: ") and warning.endswith(ends)
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    held_out = {"train": "sort", "eval": "held.jsonl"}
    sets = {"every": 1, "sets": {"one": {"data": "held.jsonl"}}}
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[1]))
    of_both = warned(tmp_path, held_out, reward=reward, rollout=rollout, eval=sets)
    assert [text.partition(":")[0] for text in of_both] == [f"row 1 ({begins})"] * 2


def test_stops_within_the_mark_of_gsm8k_are_doubted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2?", "answer": "4"}))
    data = {"train": "rows.jsonl", "eval": "sort"}
    (warning,) = warned(tmp_path, data, reward="gsm8k", rollout={"stop": ["##"]})
    assert warning.startswith("row 1 (“##”): gsm8k") and warning.endswith("another stop")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("1" * 15, "exact_match"),
        ("1" * 16, {"name": "regex", "pattern": "(?P<answer>.*)"}),
        (f"{'well ' * 20}#### 4", "gsm8k"),
        (4.0, "gsm8k"),
        (["4"], {"name": "regex", "pattern": "4"}),
    ],
)
def test_answers_that_can_be_reached_are_no_doubt(answer: Any, reward: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2?", "answer": answer}))
    assert warned(tmp_path, {"train": "rows.jsonl", "eval": "sort"}, reward=reward) == []


def test_tasks_have_no_rows_to_look_at(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "S:21=", "completion": "12"}\n')
    for train in ("rows.jsonl", "sort"):
        data = {"train": train, "eval": "sort"}
        assert told(tmp_path, {"algorithm": "sft", "data": data, "eval": {"every": 1}}) == []


def test_streamed_rows_are_looked_at(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", *[[ASKED]] * 20, *[ANSWERED] * 20)
    for algorithm, row in (("grpo", {}), ("sft", {"completion": "4"})):
        lines = [json.dumps(json.loads(line) | row) for line in (tmp_path / rows).read_text().splitlines()]
        (tmp_path / rows).write_text("\n".join(lines))
        data = {"train": rows, "streaming": True, "shuffle": False}
        (warning,) = told(tmp_path, {"algorithm": algorithm, "data": data})
        assert warning.startswith("data.train: row 2") and warning.endswith(" more")


def test_chats_are_no_doubt_where_they_are_meant(tmp_path: Path) -> None:
    rows = [{"messages": ANSWERED, "prompt": ANSWERED}, {"prompt": ANSWERED, "text": "2+2?"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    assert told(tmp_path, {"algorithm": "sft", "data": {"train": "rows.jsonl"}}) == []
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    reward = {"name": "regex", "pattern": "4"}
    data = {"train": "rows.jsonl", "prompt_format": "{text}"}
    assert told(tmp_path, {"reward": reward, "data": data}) == []


def test_held_out_rows_have_the_columns_of_rewards(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(completion, level):\n    return level\n")
    files: dict[str, list[dict[str, Any]]] = {
        "rows": [{"level": 1}],
        "eval": [{"level": 1}, {"level": None}, {}],
    }
    for name, rows in files.items():
        lines = (json.dumps({"prompt": "2+2?"} | row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    data = {"train": "rows.jsonl", "eval": "eval.jsonl"}
    with pytest.raises(SpecError, match=r"reward: eval\.jsonl:3: reward\.py:score needs level"):
        preflight(convert({"reward": "reward.py:score", "data": data}), cwd=tmp_path)
