"""Algorithms that carry something from step to step continue bit for bit after a kill."""

import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lorad.daemon.record.audit import audit
from lorad.driver.checkpoint import is_due
from lorad.protocol.journal import Reference
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

DAPO = "algorithm={name: dapo, group_size: 4, overlong: {buffer: 3}}"
DISTILL = "algorithm={name: distill, group_size: 2, kl: {reference: teacher@7}}"
ALGORITHMS = {
    "dapo": (DAPO,),
    "dapo ahead": (DAPO, "rollout.max_staleness=2"),
    "adaptive kl": ("algorithm={group_size: 4, kl: {coef: 0.1, target: 0.01, horizon: 50}}",),
    "reference that is reset": ("algorithm={group_size: 4, kl: {coef: 0.1, reset_every: 2}}",),
    "kl in the reward": ("algorithm={name: reinforce++, group_size: 1, kl: {coef: 0.1}}",),
    "moving baseline": ("algorithm={name: reinforce, baseline: moving, group_size: 1}",),
    "rft": ("algorithm={name: rft, group_size: 4}",),
    "distill": (DISTILL,),
    "distill with rewards": (DISTILL.replace("distill,", "distill, reward_coef: 1.0,"),),
}
FEW = ("trainer.steps=4", "checkpoint.every=2")
# Each has state of its own: groups left out, a moving reference, a number that moves. `test_teacher.py` kills
# a run that is distilled.
IN_CI = ("dapo ahead", "reference that is reset", "moving baseline")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def teacher(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    run = Driven(running, tmp_path_factory.mktemp("teacher"), "teacher", "seed=7")
    assert run.drive().reason == "completed"
    made = run.facts("version")[-1].data
    return Reference("teacher@7", made["sha256"], str(run.run.root / made["path"]))


@pytest.mark.system
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.long) for name in ALGORITHMS],
)
def test_kill_changes_nothing(running: Running, teacher: Reference, tmp_path: Path, algorithm: str) -> None:
    overrides = (*ALGORITHMS[algorithm], "data.prompts_per_step=6", *FEW)
    place = list(ALGORITHMS).index(algorithm)
    calm, killed = (Driven(running, tmp_path, f"{name}{place}", *overrides) for name in "ck")
    if "distill" in algorithm:
        for run in (calm, killed):
            run.params = replace(run.params, reference=teacher)
    assert calm.drive().reason == "completed"
    assert killed.struck(3, signal.SIGKILL) == -signal.SIGKILL
    assert killed.drive().reason == "completed"
    assert killed.outcome() == calm.outcome()
    assert calm.facts("version")[-1].step == 4


@pytest.mark.system
def test_refill_follows_the_order_of_the_data(running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "refill", DAPO, "data.prompts_per_step=6", *FEW)
    assert run.drive().reason == "completed"
    position = 0
    for record in run.facts("step"):
        metrics, data = record.data["metrics"], record.data
        places = [int(prompt.rsplit("/", 1)[1]) for prompt in data["prompts"]]
        assert data["position"] == position and places == sorted(places) and len(places) == 6
        assert metrics["prompts_sampled"] >= 6
        if metrics["zero_variance_groups"] == 0:
            position = places[-1] + 1
        else:
            position += int(metrics["prompts_sampled"])
    assert audit(run.run.root) == []
    sampled = [record.data["metrics"]["prompts_sampled"] for record in run.facts("step")]
    assert max(sampled) > 6, "no step had a group to replace"


@pytest.mark.system
def test_adapted_coefficient_is_reported(running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "adapted", *ALGORITHMS["adaptive kl"], *FEW)
    assert run.drive().reason == "completed"
    seen = [record.data["metrics"] for record in run.facts("step")]
    assert seen[0]["kl_coef"] == 0.1
    for before, after in pairwise(seen):
        error = np.clip(before["kl"] / 0.01 - 1, -0.2, 0.2)
        assert after["kl_coef"] == pytest.approx(before["kl_coef"] * (1 + error * 16 / 50))


@pytest.mark.system
def test_student_comes_closer_to_its_teacher(running: Running, teacher: Reference, tmp_path: Path) -> None:
    """Without a reward: the KL per token falls, and each token's advantage is its own log-ratio."""
    run = Driven(running, tmp_path, "student", DISTILL, "reward={name: regex, pattern: never}")
    run.params = replace(run.params, reference=teacher)
    assert run.drive().reason == "completed"
    kl = [record.data["metrics"]["kl"] for record in run.facts("step")]
    assert len(kl) == 7 and kl[-1] < kl[0]
    assert {record.data["metrics"]["reward"] for record in run.facts("step")} == {0.0}


def test_reset_reference_is_where_the_run_is(running: Running, tmp_path: Path) -> None:
    """Right after a reset KL is measured against the weights that are updated, where it is 0."""
    run = Driven(running, tmp_path, "reset", *ALGORITHMS["reference that is reset"], "lora.dropout=0", *FEW)
    assert run.drive().reason == "completed"
    kl = {record.step: record.data["metrics"]["kl"] for record in run.facts("step")}
    assert all((kl[step] < 1e-9) == (step in (1, 3)) for step in kl), kl


@pytest.mark.system
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.long), 2])
def test_checkpoints_by_time_change_nothing(running: Running, tmp_path: Path, ahead: int) -> None:
    how = ("trainer.steps=4", "checkpoint.every=100", "checkpoint.keep=0")
    overrides = (f"rollout.max_staleness={ahead}", *how)
    calm = Driven(running, tmp_path, f"calm{ahead}", *overrides)
    timed = Driven(running, tmp_path, f"timed{ahead}", *overrides, "checkpoint.minutes=1e-9")
    assert calm.drive().reason == "completed"
    assert timed.struck(3, signal.SIGKILL) == -signal.SIGKILL
    assert timed.drive().reason == "completed"
    assert [record.step for record in calm.facts("checkpoint")] == [4]
    assert {record.step for record in timed.facts("checkpoint")} == {1, 2, 3, 4}
    assert timed.outcome() == calm.outcome()


@pytest.mark.system
def test_minutes_count_from_the_last_checkpoint(running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "minutes", "checkpoint.every=100", "checkpoint.minutes=600")
    with run.begun() as session:
        session.state.step = 2
        assert not is_due(session)
        session.checkpointed -= 600 * 60
        assert is_due(session) and not is_due(session, 0)
