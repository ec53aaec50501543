"""Rules of `lorad why` on figures: each finds what it is about, and none finds anything in a healthy run."""

from typing import Any

import msgspec
import pytest

from lorad.protocol.inputs import RowCounts
from lorad.protocol.preflight import Rate
from lorad.records.measured import Evaluation, Step
from lorad.records.runs import Beginning, RunDetails
from lorad.records.samples import Sample
from lorad.records.versions import Version
from lorad.spec.model import Spec
from lorad.spec.text import load_spec
from lorad.why.facts import Facts
from lorad.why.table import RULES, judge

STEPS, PROMPTS, SIZE = 12, 4, 4
USUAL = {
    "updates": 1.0, "grad_norm": 0.5, "failed_rewards": 0.0, "skipped_updates": 0.0,
    "zero_variance_groups": 1.0, "truncated": 0.05, "response_length": 40.0, "empty": 0.0, "distinct": 0.9,
    "special_inside": 0.0,
    "reward_min": 0.0, "reward_max": 1.0, "entropy": 0.8, "repetition": 0.1, "logprob_difference": 1e-3,
    "policy_step": 0.01, "adapter_norm": 0.4,
}  # fmt: skip
Metrics = dict[str, Any]


def spec(*overrides: str) -> Spec:
    usual = ["algorithm.group_size=4", "data.prompts_per_step=4", "trainer.lr=1e-3"]
    return load_spec("data: {train: sort}", overrides=[*usual, *overrides])


def healthy(*overrides: str, run: dict[str, Any] | None = None, **metrics: float | list[float]) -> Facts:
    """The figures of a run that learns, but for what is given: a number for all steps, or one for each."""
    rising = [0.3 + 0.04 * place for place in range(STEPS)]
    curves: Metrics = {"reward": rising, "policy_change": [0.02 * place for place in range(1, STEPS + 1)]}
    curves |= USUAL | metrics
    steps = [
        Step(
            place + 1, metrics={key: of[place] if isinstance(of, list) else of for key, of in curves.items()}
        )
        for place in range(STEPS)
    ]
    ended: Metrics = {"name": "sorter", "state": "ended", "step": STEPS, "reason": "completed"}
    details = RunDetails(**ended | (run or {}), rate=Rate(1e-3, "grpo"))
    evals = [Evaluation(0, score=0.3, problems=256), Evaluation(STEPS, score=0.7, problems=256)]
    versions = [Version("sorter", number, attested="passed") for number in range(3)]
    return Facts(details, spec(*overrides), steps, evals, versions, samples(1), samples(STEPS))


def samples(step: int, **changes: Any) -> list[Sample]:
    """Four groups of which half of the samples are right."""
    made = [
        Sample(
            step,
            prompt_id=f"{prompt}",
            index=index,
            prompt=f"S:{prompt}",
            answer=answer(prompt),
            completion=answer(prompt) if index % 2 else "9",
            reward=float(index % 2),
            finish="stop",
            length=40 + index // 2,
        )
        for prompt in range(PROMPTS)
        for index in range(SIZE)
    ]
    return [msgspec.structs.replace(one, **{k: v(one) if callable(v) else v for k, v in changes.items()})
            for one in made]  # fmt: skip


def answer(prompt: int) -> str:
    return f"{100 + prompt}"


def having(facts: Facts, **changes: Any) -> Facts:
    return msgspec.structs.replace(facts, **changes)


def both(**changes: Any) -> dict[str, Any]:
    return {"early": samples(1, **changes), "late": samples(STEPS, **changes)}


def begun(**counts: Any) -> dict[str, Any]:
    return {"begun": Beginning(rows=RowCounts(**counts))}


FLAT: Metrics = {"reward": 0.3}
ZERO: Metrics = {"reward": 0.0, "reward_max": 0.0, "zero_variance_groups": 4.0, "updates": 0.0}
FALLING = [0.6 - 0.05 * place for place in range(STEPS)]
CASES = {
    "no-step": having(healthy(run={"reason": "failed", "detail": "no memory"}), steps=[]),
    "graders-fail": having(healthy(**FLAT, failed_rewards=16.0), **both(reward=None, error="refused")),
    "not-finite": healthy(skipped_updates=1.0, updates=0.0),
    "unserved": healthy(run={"reason": "attestation_failed", "detail": "it answers like the base"}),
    "masked": healthy("algorithm=sft", "data.train=a.jsonl", tokens=400.0, trained_tokens=1.0),
    "empty": healthy(**FLAT, empty=1.0),
    "no-end": healthy(**FLAT, truncated=1.0, special_inside=0.9),
    "blind-reward": having(healthy(**ZERO), **both(reward=0.0)),
    "cut-off": having(healthy(**FLAT, truncated=0.9), early=samples(1, finish="length", reward=0.0)),
    "inverted": having(healthy(), **both(reward=lambda one: float(one.reward == 0))),
    "answers-elsewhere": having(
        healthy(**FLAT), **both(completion=lambda one: answer((int(one.prompt_id) + 1) % PROMPTS), reward=0.0)
    ),
    "template": having(
        healthy(**FLAT, run=begun(rows=9, distinct=9, template="unused")), **both(completion="?", reward=0.0)
    ),
    "constant-reward": having(
        healthy(**FLAT, reward_min=0.5, reward_max=0.5), **both(completion="?", reward=0.5)
    ),
    "floor": having(healthy(**ZERO), **both(completion="?", reward=0.0)),
    "alike": healthy("rollout.temperature=0.01", **FLAT, distinct=0.25, zero_variance_groups=4.0),
    "solved": healthy(reward=0.95),
    "small-groups": healthy("algorithm.group_size=2", **FLAT, zero_variance_groups=3.0),
    "flat-groups": healthy(**FLAT, zero_variance_groups=4.0),
    "still": healthy("trainer.lr=0", **FLAT, policy_change=0.0, policy_step=0.0),
    "unproved": having(healthy(**FLAT), versions=[Version("sorter", 1, attested="inconclusive")]),
    "mismatch": healthy(**FLAT, logprob_difference=0.2),
    "rate": healthy("trainer.lr=0.1", reward=FALLING),
    "kl-too-strong": healthy("algorithm.kl.coef=1", **FLAT, kl=1e-4),
    "length-hacking": having(
        healthy(response_length=[40.0 + 5 * place for place in range(STEPS)]),
        **both(reward=lambda one: one.index / 4, length=lambda one: 40 + 9 * one.index, completion="?"),
    ),
    "repetition": healthy(repetition=[0.1] * 6 + [0.9] * 6),
    "entropy": healthy(**FLAT, entropy=[0.8] * 6 + [0.001] * 6),
    "kl": healthy(reward=FALLING, kl=2.0),
    "overfit": having(
        healthy("algorithm=sft", "data.train=a.jsonl", loss=FALLING, reward=[float("nan")] * STEPS),
        evals=[Evaluation(place, nll=nll) for place, nll in enumerate((2.0, 1.0, 1.5))],
    ),
    "leaking": healthy(run=begun(rows=90, distinct=90, held_out=30, seen=30)),
    "duplicates": healthy(run=begun(rows=90, distinct=4)),
    "few-evals": having(healthy(), evals=[Evaluation(0, score=0.4, problems=8),
                                          Evaluation(9, score=0.5, problems=8)]),
    "worse": healthy(reward=FALLING),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found_first(name: str) -> None:
    found = judge(CASES[name]).findings
    assert found and found[0].name == name, [finding.says for finding in found]
    assert found[0].says.endswith(".") and found[0].next


def test_every_rule_has_a_case() -> None:
    assert len(CASES) == len(RULES)


@pytest.mark.parametrize(
    "facts",
    [
        healthy(),
        having(healthy(), early=[], late=[]),  # deleted by checkpoint.keep_samples
        healthy("algorithm=sft", "data.train=a.jsonl", loss=[2.0 - 0.1 * place for place in range(STEPS)]),
        having(healthy(), steps=healthy().steps[:2]),
        having(healthy(), steps=[Step(1, metrics={"reward": 0.5, "updates": 1.0})]),  # of an older lorad
    ],
)  # fmt: skip
def test_nothing_is_found_in_a_healthy_run(facts: Facts) -> None:
    assert judge(facts).findings == []


def test_a_run_that_learns_is_said_to() -> None:
    said = judge(healthy())
    assert said.says == "Its reward went from 0.34 to 0.7 in 12 steps: it learns."
    assert said.looked == "Looked at 12 steps, 32 samples, 2 evaluations, 3 versions, 32 questions."


@pytest.mark.parametrize(("pattern", "text"), [(r"<\|im_end\|>", "<|im_end|>"), ("done###", "###")])
def test_a_pattern_for_unseen_text_is_found(pattern: str, text: str) -> None:
    facts = healthy(f"reward={{name: regex, pattern: '{pattern}'}}", "rollout.stop=['###']", **ZERO)
    (first, *_) = judge(having(facts, **both(completion="?", reward=0.0))).findings
    assert (first.name, first.figures["text"], first.next) == ("blind-reward", text, "reward.raw=true")


@pytest.mark.parametrize(
    ("reward", "learns"),
    [
        ([0.3 + 0.04 * place for place in range(STEPS)], True),
        ([0.3, 0.5, 0.35, 0.6, 0.5, 0.7, 0.6, 0.8, 0.7, 0.9, 0.8, 0.9], True),
        ([0.3, 0.5] * 6, False),
        ([0.3, 0.31, 0.9, 0.1, 0.8, 0.2, 0.42, 0.41], False),  # the ends differ by chance
        ([0.1, 0.9], False),
    ],
)
def test_a_rise_has_to_exceed_the_noise(reward: list[float], learns: bool) -> None:
    steps = [Step(place + 1, metrics={"reward": value}) for place, value in enumerate(reward)]
    assert having(healthy(), steps=steps).learns is learns


def ending(one: Sample) -> str:
    return "stop" if one.index == 0 else "length"


def test_cut_completions_come_before_the_floor() -> None:
    """GSM8K at 96 tokens on SmolLM2: hardly a completion is whole, and none earns anything."""
    facts = having(healthy(**ZERO, truncated=0.94), **both(reward=0.0, completion="?", finish=ending))
    assert [one.name for one in judge(facts).findings] == ["cut-off", "floor"]


def test_completions_that_earn_though_cut_are_well() -> None:
    facts = healthy(**FLAT, truncated=0.9)
    assert judge(having(facts, early=samples(1, finish=ending))).findings == []
