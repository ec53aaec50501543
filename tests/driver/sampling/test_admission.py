"""Prompts that are too easy or too hard are left out when they come again, and a kill changes nothing."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lorad.daemon.record.audit import audit
from lorad.driver.attempt.checkpoints import STATE
from lorad.driver.sampling.admission import draw
from lorad.driver.session import Plan
from lorad.errors import SpecError
from lorad.rl.doubts import refuse_contradictions
from lorad.spec.text import load_spec
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

KINDS = ("easy", "hard", "mixed")
REWARD = """
def score(completion, answer, **_):
    return {"easy": 1.0, "hard": 0.0}.get(answer, len(completion) % 2 / 2 + 0.25)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


def curriculum(running: Running, home: Path, name: str, *overrides: str) -> Driven:
    """A run of four rows of each kind, of which a step takes four."""
    (home / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"S:{n}{n + 1}=", "answer": KINDS[n % 3]} for n in range(12)]
    (home / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Driven(
        running, home, name, f"data.train={home / 'rows.jsonl'}", f"reward={home / 'reward.py'}:score",
        "data.difficulty={keep_easy: 0.0, keep_hard: 0.0}", "data.shuffle=false",
        "eval.every=0", "trainer.steps=9", *overrides,
    )  # fmt: skip


def kinds(run: Driven, step: int) -> set[str]:
    text = (run.run.root / run.facts("step")[step - 1].data["samples"]).read_text()
    return {msgspec.json.decode(line)["answer"] for line in text.splitlines()}


@pytest.mark.parametrize("lag", [0, 2])
def test_only_prompts_between_are_sampled_again(running: Running, tmp_path: Path, lag: int) -> None:
    run = curriculum(running, tmp_path, f"calm-{lag}", f"rollout.max_staleness={lag}")
    assert run.drive().reason == "completed"
    seen = [kinds(run, step) for step in range(1, 10)]
    assert set.union(*seen[:3]) == {*KINDS} and set.union(*seen[3 + lag :]) == {"mixed"}
    metrics = run.facts("step")[-1].data["metrics"]
    assert (metrics["prompts_easy"], metrics["prompts_hard"]) == (4, 4)
    assert audit(run.run.root) == []


@pytest.mark.system
@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.long), 2])
def test_what_is_known_outlives_a_kill(running: Running, tmp_path: Path, lag: int) -> None:
    how = (f"rollout.max_staleness={lag}", "data.difficulty={keep_easy: 0.5, keep_hard: 0.5}")
    calm, run = (curriculum(running, tmp_path, f"{name}-{lag}", *how) for name in ("even", "struck"))
    calm.drive()
    assert run.struck(5, signal.SIGKILL) == -signal.SIGKILL
    assert run.drive().reason == "completed"
    assert run.facts("attempt")[-1].data["resumed_from"] in (3, 6)
    assert run.outcome() == calm.outcome()


def test_groups_that_dynamic_sampling_drops_are_known(running: Running, tmp_path: Path) -> None:
    run = curriculum(running, tmp_path, "refilled", "algorithm.dynamic_sampling={max_batches: 3}")
    run.drive(steps=2)
    trained = {prompt.rpartition("/")[0] for fact in run.facts("step") for prompt in fact.data["prompts"]}
    state = msgspec.json.decode((run.run.checkpoint(2, 1) / STATE).read_bytes())
    assert state["ratings"].keys() - trained


def drawn(known: dict[str, float], n: int, **difficulty: float) -> list[int]:
    examples = [SimpleNamespace(id=f"{place % 10}/{place // 10}") for place in range(100)]
    data = SimpleNamespace(size=10, take=lambda position, count: examples[position : position + count])
    session: Any = SimpleNamespace(
        spec=load_spec("", overrides=[f"data.difficulty={json.dumps(difficulty)}"]), train_data=data
    )
    draws = draw(session, Plan(0, [], 0, 0, 0, ratings=known), n)
    assert draws.looked == draws.places[-1] + 1 or draws.looked == data.size
    assert [example.id[0] for example in draws.examples] == [str(place % 10) for place in draws.places]
    return draws.places


def test_a_round_with_too_few_is_filled_up() -> None:
    known = {str(number): 1.0 for number in range(8)}
    assert drawn(known, 4, keep_easy=0.0) == [0, 1, 8, 9]
    assert drawn(known, 2, keep_easy=0.0) == [8, 9]


def test_a_share_of_what_is_known_comes_again() -> None:
    known = {str(number): 0.0 for number in range(10)}
    counts = [len(drawn(known, 5, keep_hard=share)) for share in (0.0, 1.0)]
    assert counts == [5, 5] and drawn(known, 5, keep_hard=1.0) == [0, 1, 2, 3, 4]
    del known["3"]
    assert drawn(known, 1, keep_hard=0.0) == [3]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.difficulty={}"], "no prompt of a builtin task comes twice"),
        (["data.difficulty={}", "algorithm=sft", "data.train=rows.jsonl"], "it has no effect"),
    ],
)
def test_difficulty_without_effect_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        refuse_contradictions(load_spec("", overrides=overrides))
    assert refused.value.key == "data.difficulty"


def test_hard_is_below_easy() -> None:
    with pytest.raises(SpecError, match=r"hard 0\.5 is not below easy 0\.5"):
        load_spec("", overrides=["data.difficulty={easy: 0.5, hard: 0.5}"])
