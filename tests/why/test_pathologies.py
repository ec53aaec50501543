"""Runs that are made to fail in one way each: `lorad why` names it first, and nothing in healthy ones."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lorad.rl.tasks import problem
from lorad.why.finding import Why
from lorad.why.table import explain
from tests.kit.pool_kit import TINY
from tests.kit.world import World, world

SPEC = """
seed: 3
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 2.0e-3, steps: 4}
rollout: {max_new_tokens: 12}
eval: {every: 0}
checkpoint: {every: 100}
attest: {canaries: 4, tokens: 12}
"""
REWARDS = """
def constant(completion, answer):
    return 0.5

def zero(completion, answer):
    return 0.0

def inverted(completion, answer):
    return float(completion.strip() != answer)

def long(completion, answer):
    return len(completion) / 32

def ones(completion, answer):
    return completion.count("1") / max(len(completion), 8)

def half(completion, answer):
    if len(completion) % 2:
        raise ValueError("an odd length")
    return float(completion.strip() == answer)
"""
JUDGE = (
    "reward={name: judge, url: 'http://127.0.0.1:9/v1', model: m, timeout: 1, retries: 0, max_failures: 1}"
)
SUPERVISED = ("algorithm={name: sft}", "data.train=taught.jsonl")

# name: the finding, and what is changed
CASES: Mapping[str, tuple[str, Sequence[str]]] = {
    "constant reward": ("constant-reward", ["reward=rewards.py:constant"]),
    "a reward that is always 0": ("blind-reward", ["reward=rewards.py:zero"]),
    "answers that the base never gives": ("floor", ["data.train=never.jsonl"]),
    "inverted reward": ("inverted", ["reward=rewards.py:inverted"]),
    "shuffled answers": ("answers-elsewhere", ["data.train=shuffled.jsonl"]),
    "lr 0": ("still", ["trainer.lr=0"]),
    "lr of sft 0": ("still", [*SUPERVISED, "trainer.lr=0", "eval.every=4", "data.eval=held_out.jsonl"]),
    "lr x100": ("rate", ["trainer.lr=0.1"]),
    "A and B zero": ("still", ["lora.init=zero"]),
    "B frozen": ("still", ["trainer.loraplus_lr_ratio=1e-7"]),
    "truncation at 4 tokens": ("cut-off", ["rollout.max_new_tokens=4"]),
    "wrong template": (
        "template",
        ["model.path=templated", "data={train: bare.jsonl, prompts_per_step: 4, chat_template: never}"],
    ),
    "missing end token": ("no-end", ["model.path=endless", "data.train=rows.jsonl"]),
    "leaking eval": (
        "leaking", ["data={train: rows.jsonl, eval: leaked.jsonl, prompts_per_step: 4}", "eval.every=6"],
    ),
    "duplicated prompts": ("duplicates", ["data.train=twice.jsonl"]),
    "group size 2": ("small-groups", ["algorithm.group_size=2", "trainer.lr=1e-4"]),
    "temperature 0.01": ("alike", ["rollout.temperature=0.01"]),
    "KL too strong": ("kl-too-strong", ["algorithm.kl.coef=10"]),
    "a reward that cannot see": ("blind-reward", ["reward={name: regex, pattern: '<eos>'}"]),
    "a reward for a stop string": (
        "blind-reward", ["reward={name: regex, pattern: '9#'}", "rollout.stop=['9#']"],
    ),
    "judge down": ("graders-fail", [JUDGE]),
    "a reward that raises": ("graders-fail", ["reward={name: 'rewards.py:half', max_failures: 1}"]),
    "length hacking": (
        "length-hacking", ["reward=rewards.py:long", "rollout.max_new_tokens=32", "trainer.steps=9"],
    ),
    "repetition": (
        "repetition",
        [
            "reward=rewards.py:ones", "data.prompts_per_step=8", "rollout.max_new_tokens=32",
            "trainer.steps=12",
        ],
    ),
    "a stop that is everywhere": ("empty", ["rollout.stop=['0','1','2','3','4','5','6','7','8','9']"]),
    "learnt by heart": (
        "overfit",
        [
            *SUPERVISED, "data.train=few.jsonl", "data.eval=held_out.jsonl", "eval.every=4",
            "trainer={lr: 1e-2, steps: 6}",
        ],
    ),
    "few evaluations": (
        "few-evals", ["eval={every: 8, problems: 2}", "algorithm.group_size=8", "trainer.steps=8"],
    ),
}  # fmt: skip
# by the same rule as another case, which CI has
LONG = ("a reward that cannot see", "lr of sft 0", "a reward that raises", "sort by dapo")
HEALTHY: Mapping[str, Sequence[str]] = {
    "sort by grpo": ["algorithm.group_size=8"],
    "sort by dapo": ["algorithm={name: dapo, group_size: 8}"],
    "rows by sft": [*SUPERVISED, "data.eval=held_out.jsonl", "eval={every: 4, problems: 16}"],
}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def model(box: World, name: str, **files: Mapping[str, Any]) -> None:
    """Copy the tiny base, with other settings in its files; None takes one away."""
    shutil.copytree(TINY, box.root / name)
    for stem, changes in files.items():
        path = box.root / name / f"{stem}.json"
        settings = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def cases(table: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(case, marks=[pytest.mark.long] if case in LONG else ()) for case in table]


@pytest.fixture(scope="module")
def box() -> Iterator[World]:
    with world() as made:
        problems = [problem("sort", "train", 9, index) for index in range(72)]
        rows = [{"prompt": one.prompt, "answer": one.answer} for one in problems]
        taught = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        answers = [row["answer"] for row in rows[:12]]
        files = {
            "rows": rows[:64], "leaked": rows[48:], "twice": rows[:4] * 16, "taught": taught[:64],
            "held_out": taught[64:], "few": [{**row, "completion": "0000000"} for row in taught[:4]],
            "never": [{**row, "answer": "none"} for row in rows],
            "shuffled": [{**row, "answer": answers[i - 1]} for i, row in enumerate(rows[:12])],
            "bare": [{**row, "prompt": row["prompt"][2:-1]} for row in rows],
        }  # fmt: skip
        for name, some in files.items():
            write(made.root / f"{name}.jsonl", some)
        (made.root / "rewards.py").write_text(REWARDS)
        template = "{% for message in messages %}S:{{ message['content'] }}={% endfor %}"
        model(made, "templated")
        (made.root / "templated/chat_template.jinja").write_text(template)
        ends = {"eos_token_id": None}
        model(made, "endless", generation_config=ends, config=ends, tokenizer_config={"eos_token": None})
        yield made


def explained(box: World, case: str, overrides: Sequence[str]) -> Why:
    name = "".join(letter if letter.isalnum() else "-" for letter in case).lower()
    box.run(name, *overrides, text=SPEC)
    return explain(box.client, name)


@pytest.mark.system
@pytest.mark.parametrize("case", cases(CASES))
def test_what_is_wrong_is_found_first(box: World, case: str) -> None:
    expected, overrides = CASES[case]
    findings = explained(box, case, overrides).findings
    print(f"{case}: " + " | ".join(f"{one.name}: {one.says} Try: {one.next}" for one in findings))
    assert [one.name for one in findings][:1] == [expected]


@pytest.mark.system
@pytest.mark.parametrize("case", cases(HEALTHY))
def test_nothing_is_wrong_with_a_healthy_run(box: World, case: str) -> None:
    answer = explained(box, case, HEALTHY[case])
    print(f"{case}: {answer.says}")
    assert answer.findings == []


@pytest.mark.system
def test_rows_that_train_nothing_are_refused(box: World) -> None:
    """Such a run never starts, so that nothing of it can be asked."""
    chat = [{"role": "user", "content": "S:21="}, {"role": "assistant", "content": "12", "weight": 0}]
    write(box.root / "masked.jsonl", [{"messages": chat}])
    done = box.lorad("check", box.spec(SPEC), "algorithm={name: sft}", "data.train=masked.jsonl", expect=2)
    assert "masked.jsonl" in done.stderr
