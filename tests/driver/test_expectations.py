"""Figures that a run should come to: refused where they cannot be judged, and judged where the run comes."""

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lorad.errors import SpecError
from lorad.protocol.evals import Expected, judged
from lorad.records.metrics import metric_of
from lorad.rl.doubts import refuse_contradictions
from lorad.spec.kept import Expectation
from lorad.spec.text import load_spec
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

EXPECT = (
    "expect=[{metric: eval, step: 0, low: 0.0, high: 1.0, source: a table}, "
    "{metric: reward, step: 4, low: 2.0}, {metric: kl_coef, step: 4, high: 1.0}, {metric: eval, low: 0.0}]"
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


def outcomes(run: Driven) -> list[tuple[str, int, str]]:
    records = [msgspec.convert(record.data, Expected) for record in run.facts("expect")]
    return [(one.metric, one.step, one.outcome) for one in records]


@pytest.mark.parametrize(
    ("expect", "key", "says"),
    [
        ("{metric: evil, low: 1}", "metric", "Did you mean eval?"),
        ("{metric: perplexity, low: 1}", "metric", "is not measured by this run"),
        ("{metric: kl, high: 1}", "metric", "algorithm.kl.coef"),
        ("{metric: eval/hard, low: 1}", "metric", "is not measured by this run"),
        ("{metric: reward}", "", "it has no bound"),
        ("{metric: reward, low: 0.5, high: 0.2}", "low", "0.5 is more than high, 0.2"),
        ("{metric: reward, step: 61, low: 0.5}", "step", "after 60 steps"),
        ("{metric: reward, step: 0, low: 0.5}", "step", "the first one is 1"),
        ("{metric: eval, step: 15, low: 0.5}", "step", "Set it to 10 or 20"),
        ("{metric: eval, step: 59, low: 0.5}", "step", "Set it to 50 or 60"),
    ],
)
def test_what_cannot_be_judged_is_refused(expect: str, key: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        refuse_contradictions(load_spec(f"expect:\n- {{metric: reward, low: 0}}\n- {expect}\n"))
    assert str(refused.value).startswith(f"expect[1].{key}".removesuffix(".") + ": ")
    assert says in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    "section", ["eval: {every: 0}", "data: {train: rows.jsonl}", "algorithm: tinker"], ids=str.split
)
def test_nothing_is_expected_where_nothing_is_evaluated(section: str) -> None:
    with pytest.raises(SpecError, match=r"expect(\[0\].metric)?: "):
        refuse_contradictions(load_spec(f"{section}\nexpect: [{{metric: eval, low: 0.5}}]"))


@pytest.mark.parametrize(
    "expect",
    [
        "{metric: eval, low: 0}",
        "{metric: eval, step: 0, high: 1}",
        "{metric: eval, step: 60, low: 0}",
        "{metric: eval/hard/pass@4, step: 20, low: 0}",
        "{metric: reward/fmt, step: 1, low: 0}",
        "{metric: logprob_difference, high: 0.011, source: SkyRL's CI}",
    ],
)
def test_what_a_run_measures_may_be_expected(expect: str) -> None:
    sets = "eval: {sets: {hard: {data: sort, n: 4, temperature: 1.0, every: 20}}}"
    refuse_contradictions(load_spec(f"{sets}\nexpect: [{expect}]"))


def test_an_unknown_key_is_refused_by_place() -> None:
    with pytest.raises(SpecError, match=r"expect\[0\]") as refused:
        load_spec("expect: [{metric: eval, atleast: 0.5}]")
    assert "metric, step, low, high, source" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("done", "is_over", "value", "outcome"),
    [
        (3, False, None, "pending"),
        (3, True, None, "not reached"),
        (4, False, None, "pending"),
        (4, True, None, "missed"),
        (5, False, None, "missed"),
        (4, False, 0.5, "met"),
        (9, True, 0.6, "met"),
        (4, False, 0.49, "missed"),
        (4, True, 0.61, "missed"),
        (4, True, float("nan"), "missed"),
    ],
)
def test_a_figure_is_judged_at_its_step(done: int, is_over: bool, value: float | None, outcome: str) -> None:
    expectation = Expectation(metric="eval", step=4, low=0.5, high=0.6)
    expected = judged(expectation, 10, done, lambda step: {"eval": value, "step": step}, is_over=is_over)
    assert (expected.outcome, expected.step) == (outcome, 4)


def test_words_say_value_bounds_and_source() -> None:
    met = Expected("eval", 116, 0.52, 0.57, "verl's table", "met", 0.543)
    assert met.in_words == "eval met 0.543 at 116, expected 0.52 to 0.57 (verl's table)"
    assert (
        Expected("kl", 4, None, 0.1, "", "not reached").in_words
        == "kl not reached at 4, expected at most 0.1"
    )
    missed = Expected("kl", 4, 0.1, None, "", "missed").in_words
    assert missed == "kl missed, not measured at 4, expected at least 0.1"


def test_a_run_journals_what_it_came_to(running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "judged", EXPECT)
    assert run.drive().reason == "completed"
    assert outcomes(run) == [
        ("eval", 0, "met"), ("reward", 4, "missed"), ("kl_coef", 4, "missed"), ("eval", 7, "met"),
    ]  # fmt: skip
    measured = {name for record in run.facts("step") for name in record.data["metrics"]}
    assert measured and not {name for name in measured if metric_of(name) is None}


@pytest.mark.system
def test_a_killed_run_judges_the_same(running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "killed", EXPECT)
    assert run.struck(5, signal.SIGKILL) == -signal.SIGKILL
    run.drive()
    assert [one[1] for one in outcomes(run)] == [0, 4, 4, 7]
