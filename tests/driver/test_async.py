"""Sampling ahead of training: which version makes which samples is fixed, and a kill changes nothing."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lorad.daemon.record.audit import audit
from lorad.driver import pending
from lorad.driver.rewards import Scoring
from lorad.driver.sample import refuse_stale
from lorad.driver.session import Plan, Rollout
from lorad.errors import Conflict, IntegrityError, LoradError
from lorad.spec.text import load_spec
from tests.driver.driven import SPEC, Driven
from tests.kit.pool_kit import Running, running_pool, until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


class Calm(dict[int, Driven]):
    """Runs that nobody disturbs, by how many steps they are ahead; each is made once it is looked at."""

    def __init__(self, running: Running, home: Path) -> None:
        self._place = running, home

    def __missing__(self, lag: int) -> Driven:
        run = self[lag] = Driven(*self._place, f"calm-{lag}", f"rollout.max_staleness={lag}")
        assert run.drive().reason == "completed"
        return run


@pytest.fixture(scope="module")
def calm(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return Calm(running, tmp_path_factory.mktemp("calm"))


def samples(run: Driven, step: int) -> list[dict[str, Any]]:
    text = (run.run.root / run.facts("step")[step - 1].data["samples"]).read_text()
    return [msgspec.json.decode(line) for line in text.splitlines()]


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("sampler")]


@pytest.mark.parametrize("lag", [1, 2])
def test_samples_are_as_old_as_the_lag(calm: Calm, lag: int) -> None:
    steps = calm[lag].facts("step")
    assert [r.data["metrics"]["staleness"] for r in steps] == [min(i, lag) for i in range(7)]
    updates = [int(r.data["metrics"]["updates"]) for r in steps]  # a step without a gradient has none
    assert [r.data["version"] for r in steps] == [sum(updates[: max(0, i - lag)]) for i in range(7)]
    assert {s["version"] for s in samples(calm[lag], 7)} == {f"calm-{lag}@{sum(updates[: 6 - lag])}"}


def test_a_step_without_a_gradient_changes_nothing(calm: Calm) -> None:
    steps, made = calm[1].facts("step"), {r.step for r in calm[1].facts("version")}
    empty = [r for r in steps if r.data["metrics"]["updates"] == 0]
    idle = accumulate(r in empty for r in steps)
    assert [r.data["metrics"]["idle_steps_total"] for r in steps] == [*idle]
    assert empty and made == {0, *(r.step for r in steps)} - {r.step for r in empty}
    assert [audit(calm[lag].run.root) for lag in (1, 2)] == [[], []]
    for metrics in (r.data["metrics"] for r in empty):
        assert metrics["zero_variance_groups"] == 4 and metrics["response_length"] > 0
        assert not {"kl", "loss", "entropy", "ratio", "clip_fraction", "grad_norm", "seconds_publish"} & set(
            metrics
        )


def test_spec_can_ask_for_updates_without_gradient(running: Running, tmp_path: Path) -> None:
    how = ("algorithm.skip_empty_updates=false", "rollout.max_staleness=1", "eval.every=0", "trainer.steps=3")
    run = Driven(running, tmp_path, "empty", *how)
    run.drive()
    metrics = run.facts("step")[1].data["metrics"]
    assert [r.step for r in run.facts("version")] == [0, 1, 2, 3]
    assert metrics["zero_variance_groups"] == 4 and (metrics["updates"], metrics["grad_norm"]) == (1, 0)


def test_old_samples_do_not_measure_the_engine(calm: Calm) -> None:
    for metrics in (r.data["metrics"] for r in calm[2].facts("step")):
        if (difference := metrics.get("logprob_difference")) is not None:  # dropout is 0.1, and not in it
            assert difference < 1e-5 and "staleness_difference" not in metrics
    stale = [
        r.data["metrics"] for r in calm[2].facts("step") if "logprob_difference" not in r.data["metrics"]
    ]
    assert stale and max(metrics.get("staleness_difference", 0.0) for metrics in stale) > 1e-4


def test_killed_and_resumed_equals_undisturbed(calm: Calm, running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "killed", "rollout.max_staleness=2")
    assert run.struck(4, signal.SIGKILL) == -signal.SIGKILL
    assert run.drive().reason == "completed"
    assert run.facts("attempt")[-1].data["resumed_from"] in (3, 6)
    assert run.outcome() == calm[2].outcome()


@pytest.mark.system
def test_stopped_and_resumed_equals_undisturbed(calm: Calm, running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "stopped", "rollout.max_staleness=1")
    assert run.struck(2, signal.SIGTERM) == 0
    assert run.facts("end")[-1].data["reason"] == "stopped"
    assert run.drive().reason == "completed"
    assert run.outcome() == calm[1].outcome()


@pytest.mark.system
def test_resume_with_more_steps_equals_one_attempt(calm: Calm, running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "more", "rollout.max_staleness=2", "eval.every=0")
    assert run.drive(steps=4).reason == run.drive(steps=7).reason == "completed"
    assert run.outcome() == calm[2].outcome() | {"evals": []}


@pytest.mark.system(but="2-1")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 0), (0, 2)])
def test_a_resume_may_change_the_lag(running: Running, tmp_path: Path, before: int, after: int) -> None:
    run = Driven(
        running, tmp_path, f"lag-{before}-{after}", f"rollout.max_staleness={before}", "eval.every=0"
    )
    run.drive(steps=2)
    run.set(f"rollout.max_staleness={after}")
    assert run.drive(steps=5).reason == "completed"
    steps = run.facts("step")
    assert [r.data["position"] for r in steps] == [4 * i for i in range(5)]
    assert max(r.data["metrics"]["staleness"] for r in steps[2:]) == after
    assert bool(run.facts("warning")) == (before > after > 0)


@pytest.mark.system
def test_samples_of_changed_prompts_are_made_again(running: Running, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "S:21=", "answer": "12"}\n' * 4)
    run = Driven(running, tmp_path, "gone", f"data.train={rows}", "rollout.max_staleness=1", "eval.every=0")
    run.drive(steps=2)
    rows.write_text('{"prompt": "S:31=", "answer": "13"}\n' * 4)
    assert run.drive(steps=4).reason == "completed"
    assert {s["prompt"] for s in samples(run, 3)} == {"S:31="}
    assert any("other prompts" in r.data["message"] for r in run.facts("warning"))


@pytest.mark.system
def test_resume_scores_samples_with_failed_rewards_again(running: Running, tmp_path: Path) -> None:
    reward, broken = tmp_path / "reward.py", tmp_path / "broken"
    reward.write_text(
        f"import os\ncalls = 0\ndef score(completion, **_):\n    global calls\n    calls += 1\n"
        f"    assert calls <= 32 or not os.path.exists({str(broken)!r})\n    return len(completion)\n"
    )
    broken.touch()
    how = (
        "rollout.max_staleness=2",
        "eval.every=0",
        "checkpoint.every=1",
        f"reward={{name: {reward}:score}}",
    )
    run = Driven(running, tmp_path, "unscored", *how)
    assert "reward failed on 16 of 16 samples of step 3" in run.drive(steps=4).detail
    assert run.facts("step")[-1].data["metrics"]["zero_variance_groups"] == 0  # no group has any reward
    broken.unlink()
    assert run.drive(steps=4).reason == "completed"


def test_kept_samples_of_an_unknown_version_are_refused(
    calm: Calm,
) -> None:
    run = calm[2]
    session: Any = SimpleNamespace(spec=load_spec(run.run.spec.read_text()), params=run.params, name_of=str)
    before = [fact for fact in run.facts("version") if fact.step < 5]
    with pytest.raises(IntegrityError, match="no such version of step 5"):
        pending.read(session, run.run.checkpoint(7, 1), before)


def test_too_old_samples_are_refused() -> None:
    session: Any = SimpleNamespace(
        spec=load_spec(SPEC, overrides=["rollout.max_staleness=1"]),
        name_of=str,
        params=SimpleNamespace(run="a"),
    )
    fresh, old = [
        Rollout(Plan(5, [], 0, made, made), [], [], 0, 0, 0, 0.0, 0.0, Scoring.of([])) for made in (4, 3)
    ]
    refuse_stale(session, fresh)
    with pytest.raises(LoradError, match="2 versions old"):
        refuse_stale(session, old)


def test_failure_ahead_is_raised_when_samples_are_taken(running: Running, tmp_path: Path) -> None:
    with Driven(running, tmp_path, "wrong", "rollout.max_staleness=1").begun() as session:
        assert session.ahead is not None
        session.state.version = 99
        with pytest.raises(Conflict, match="wrong@99 is not an attested version"), session.ahead as ahead:
            ahead.take(0)
    assert not samplers()


def test_slow_reward_does_not_delay_the_end(running: Running, tmp_path: Path) -> None:
    reward, begun = tmp_path / "slow.py", tmp_path / "begun"
    reward.write_text(
        f"import pathlib, time\ndef score(**_):\n    open({str(begun)!r}, 'w')\n    time.sleep(600)\n"
    )
    how = f"reward={{name: {reward}:score, timeout: 1000}}"
    run = Driven(running, tmp_path, "slow", "rollout.max_staleness=1", "eval.every=0", how)
    with run.begun() as session, session.ahead or contextlib.nullcontext():
        until(begun.exists)
    assert not samplers()


def test_lost_pool_ends_the_run_without_leftover_threads(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as elsewhere, running_pool(tmp_path) as running:
        run = Driven(running, tmp_path, "left", "rollout.max_staleness=2", "trainer.steps=1000")
        end = elsewhere.submit(run.drive)
        until(lambda: len(run.facts("step")) >= 3)
    assert end.result().reason == "lost"
    assert not samplers()


def test_pool_keeps_the_versions_that_lag_needs(running: Running, tmp_path: Path) -> None:
    overrides = ("rollout.max_staleness=2", "resources.priority=3", "attest.amplified_every=7")
    with Driven(running, tmp_path, "keeper", *overrides).begun():
        asked = running.pool.tenants["keeper"].spec
    assert (asked.kept, asked.priority, asked.amplified_every) == (4, 3, 7)


def test_without_a_lag_there_is_no_thread(running: Running, tmp_path: Path) -> None:
    with Driven(running, tmp_path, "plain").begun() as session:
        assert session.ahead is None


@pytest.mark.system
def test_it_learns(running: Running, tmp_path: Path) -> None:
    run = Driven(
        running,
        tmp_path,
        "learner",
        *(
            "rollout.max_staleness=2",
            "trainer.steps=12",
            "lora.dropout=0",
            "eval.every=12",
            "eval.problems=64",
        ),
        *(
            "data.prompts_per_step=8",
            "algorithm.group_size=8",
            "trainer.schedule=constant",
            "checkpoint.every=12",
        ),
        "rollout.max_new_tokens=12",
    )
    run.drive()
    first, last = (r.data["score"] for r in run.facts("eval"))
    assert first < 0.4 and last > 0.7
