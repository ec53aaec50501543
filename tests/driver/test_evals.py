"""Evaluations of several sets, kept completions, the best versions, and the end when there is no progress."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.driver.evals.evaluate import summary
from lorad.errors import SpecError
from lorad.protocol.evals import best_first, chosen, pass_at
from lorad.rl.doubts import refuse_contradictions
from lorad.spec.text import load_spec
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

SETS = (
    "eval={every: 2, problems: 4, sets: {warm: {data: sort, n: 4, temperature: 0.8, problems: 3}, "
    "size: {data: reverse, every: 4, problems: 2, reward: 'size.py:size'}}}"
)
STOP = ("eval={every: 1, problems: 4, stop: {patience: 2, min_delta: 1.0}}", "trainer.steps=6")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "size.py").write_text("def size(completion):\n    return float(len(completion))\n")
    return tmp_path


def completions(run: Driven) -> list[list[dict[str, Any]]]:
    files = [run.run.root / record.data["samples"] for record in run.facts("eval")]
    return [[msgspec.json.decode(line) for line in file.read_text().splitlines()] for file in files]


def test_sets_are_due_at_their_own_steps(running: Running, home: Path) -> None:
    run = Driven(running, home, "sets", SETS)
    assert run.drive().reason == "completed"
    evals = run.facts("eval")
    assert [r.step for r in evals] == [0, 2, 4, 6, 7]
    assert [sorted(r.data["sets"]) for r in evals] == [
        ["size", "warm"], ["warm"], ["size", "warm"], ["warm"], ["size", "warm"],
    ]  # fmt: skip
    warm, size = evals[0].data["sets"]["warm"], evals[0].data["sets"]["size"]
    assert (warm["n"], [*warm["passed"]], size["problems"]) == (4, ["pass@1", "pass@2", "pass@4"], 2)
    first = [line for line in completions(run)[0] if line["set"] == "size"]
    assert size["score"] == sum(len(line["completion"]) for line in first) / 2
    assert {next(iter(line)) for line in first} == {"set"}  # by which its readers find the lines of a set


@pytest.mark.system
def test_sets_change_no_bit_of_a_run(running: Running, home: Path) -> None:
    plain, more = (
        Driven(running, home, *how, "trainer.steps=4") for how in (("plain", "eval.every=2"), ("more", SETS))
    )
    assert [plain.drive().reason, more.drive().reason] == ["completed"] * 2
    assert plain.outcome() == more.outcome()


@pytest.mark.system
def test_killed_and_resumed_has_the_same_completions(running: Running, home: Path) -> None:
    how = (SETS, "trainer.steps=4", "checkpoint.every=2")
    calm, killed = (Driven(running, home, name, *how) for name in ("calm", "killed"))
    calm.drive()
    assert killed.struck(3, signal.SIGKILL) == -signal.SIGKILL
    killed.drive()
    told = [
        [[(x["set"], x["problem"], x["completion"], x["reward"]) for x in one] for one in completions(run)]
        for run in (calm, killed)
    ]
    assert told[0] == told[1] and calm.outcome() == killed.outcome()
    assert [r.data["sets"] for r in calm.facts("eval")] == [r.data["sets"] for r in killed.facts("eval")]


def test_run_without_progress_ends_early(running: Running, home: Path) -> None:
    run = Driven(running, home, "stop", *STOP)
    end = run.drive()
    assert end.reason == "completed" and end.detail.startswith("2 of 6 steps, ended early by eval.stop: eval")
    assert [r.step for r in run.facts("checkpoint")] == [2]
    again = run.drive()
    assert again.detail.startswith("4 of 6 steps, ended early")


def test_kill_does_not_prolong_a_run_without_progress(running: Running, home: Path) -> None:
    run = Driven(running, home, "early", *STOP, "checkpoint.every=1")
    run.drive()
    lines = run.run.journal.read_bytes().splitlines(keepends=True)
    run.run.journal.write_bytes(b"".join(lines[:-1]))  # it died before it could say so
    assert run.drive().detail.startswith("2 of 6 steps, ended early")


@pytest.mark.system
def test_each_new_best_gets_a_checkpoint(running: Running, home: Path) -> None:
    keep = ("checkpoint={every: 100, keep_best: 1, best_by: eval/warm}", "trainer.steps=4", SETS)
    run = Driven(running, home, "best", *keep)
    run.drive()
    scores = {r.step: r.data["sets"]["warm"]["score"] for r in run.facts("eval")}
    new = [step for step in scores if step and scores[step] > max(v for s, v in scores.items() if s < step)]
    assert [r.step for r in run.facts("checkpoint")] == sorted({*new, 4})


def test_pass_at_k_is_without_bias() -> None:
    assert pass_at(1, [(4, 1), (4, 3)]) == 0.5
    assert pass_at(2, [(4, 1)]) == 0.5 and pass_at(4, [(4, 1), (4, 0)]) == 0.5
    assert pass_at(4, [(3, 1)]) is None
    found = summary(4, 1.0, [[1.0, 0.0, None, 1.0], [0.0] * 4])
    assert (found.failed, found.problems) == (1, 2) and found.score == pytest.approx(2 / 7)
    assert found.passed == {"pass@1": pytest.approx(1 / 3), "pass@2": 0.5, "pass@4": 0.0}


def test_best_is_the_first_of_equals() -> None:
    evals = [{"eval": 0.5, "nll": 2.0}, {"eval": 0.9, "nll": 1.0}, {"nll": 0.5}, {"eval": 0.9}]
    assert best_first("eval", evals) == [1, 3, 0] and best_first("nll", evals) == [2, 1, 0]
    assert (chosen(None, evals), chosen(None, [{"nll": 1.0}]), chosen(None, [{}])) == ("eval", "nll", None)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("eval: {sets: {hard: {dat: sort}}}", "eval.sets.hard.dat"),
        ("eval: {sets: {hard: {data: sort, n: 0}}}", "eval.sets.hard.n"),
        ("eval: {sets: {hard: {data: sort, n: 3}}}", "eval.sets.hard.n"),
        ("eval: {sets: {hard: {data: sort, temperature: 0.001}}}", "eval.sets.hard.temperature"),
        ("eval: {every: 4, sets: {hard: {data: sort, every: 6}}}", "eval.sets.hard.every"),
        ("eval: {sets: {hard: {data: lookup}}}", "eval.sets.hard.data"),
        ("eval: {sets: {main: {data: sort}}}", "eval.sets"),
        ("eval: {every: 0, stop: {}}", "eval.stop"),
        ("eval: {every: 0}\ncheckpoint: {keep_best: 2}", "checkpoint.keep_best"),
        ("checkpoint: {best_by: eval/hard}", "checkpoint.best_by"),
        ("checkpoint: {best_by: nll}", "checkpoint.best_by"),
        ("{env: lookup, data: {train: lookup}, eval: {sets: {a: {data: lookup, reward: math}}}}",
         "eval.sets.a.reward"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_key(text: str, key: str) -> None:
    with pytest.raises(SpecError) as caught:
        refuse_contradictions(load_spec(text))
    assert caught.value.key == key
