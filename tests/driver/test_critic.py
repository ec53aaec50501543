"""Runs with a critic: who learns when, what is written down, and that a kill changes nothing."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lorad.driver.critic import estimate
from lorad.driver.session import TrainBatch
from lorad.protocol.batch import Batch
from lorad.protocol.calls import CRITIC
from lorad.spec.text import load_spec
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

WARM_UP, STEPS = 3, 5
PPO = (
    *("algorithm.name=ppo", f"algorithm.critic.warmup_steps={WARM_UP}", "algorithm.epochs=2"),
    *("lora.dropout=0", f"trainer.steps={STEPS}", "checkpoint.every=2", "algorithm.kl.coef=0.01"),
)
OF_CRITIC = {"explained_variance", "value", "value_loss", "value_clip_fraction", "critic_grad_norm"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def calm(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    run = Driven(running, tmp_path_factory.mktemp("calm"), "calm", *PPO)
    assert run.drive().reason == "completed"
    return run


def numbers(run: Driven) -> list[dict[str, float]]:
    """What a critic says in each step; times left out."""
    return [
        {key: value for key, value in record.data["metrics"].items() if key in OF_CRITIC}
        for record in run.facts("step")
    ]


def critic_of(run: Driven, step: int) -> Path:
    (path,) = (r.data["path"] for r in run.facts("checkpoint") if r.step == step)
    return run.run.root / str(path) / CRITIC


def test_each_token_bears_its_own_penalty() -> None:
    spec = load_spec(
        "{model: {path: builtin:tiny}, data: {train: sort}, algorithm: {name: ppo, scale: one, lam: 1.0}}"
    )
    batch = Batch.of([(np.ones(2, np.int32), [np.zeros(2, np.int32), np.zeros(1, np.int32)])])
    values = np.array([0.5, 0.25, 0.0], np.float32)
    sizes = (batch.target_lengths, batch.group_sizes, np.array([0, 1]))
    known = TrainBatch(batch, np.arange(2), np.zeros(1, np.int64), values, *sizes, values=values)
    session: Any = SimpleNamespace(spec=spec)
    found, targets = estimate(session, known, np.array([1.0, -1.0]), np.array([0.1, 0.2, 0.3]))
    np.testing.assert_allclose(targets.returns, [0.7, 0.8, -1.3], atol=1e-6)
    np.testing.assert_allclose(found, [0.2, 0.55, -1.3], atol=1e-6)


@pytest.mark.system
def test_only_the_critic_learns_in_its_warmup(calm: Driven) -> None:
    assert [record.step for record in calm.facts("version")] == [0, *range(WARM_UP + 1, STEPS + 1)]
    steps = [record.data["metrics"] for record in calm.facts("step")]
    assert [step["updates"] for step in steps] == [0.0] * WARM_UP + [2.0] * (STEPS - WARM_UP)
    assert all("entropy" not in step for step in steps[:WARM_UP])
    assert all("logprob_difference" in step for step in steps)
    assert [bool(step["value"]) for step in steps] == [False] + [True] * (STEPS - 1)


def test_steps_say_how_the_critic_does(calm: Driven) -> None:
    found = numbers(calm)
    assert found[0].keys() >= OF_CRITIC - {"explained_variance"} and found[-1].keys() == OF_CRITIC
    assert calm.facts("step")[-1].data["metrics"]["kl"] != 0
    assert "zero_variance_groups" not in calm.facts("step")[0].data["metrics"]


def test_checkpoints_hold_the_critic(calm: Driven) -> None:
    places = [critic_of(calm, step) for step in (STEPS - 1, STEPS)]
    heads = [load_file(place / "value_head.safetensors")["weight"] for place in places]
    assert heads[0].any() and (heads[0] != heads[1]).any()


@pytest.mark.system
@pytest.mark.parametrize("at", [3, pytest.param(4, marks=pytest.mark.long)])
def test_killed_and_resumed_equals_undisturbed(
    calm: Driven, running: Running, tmp_path: Path, at: int
) -> None:
    run = Driven(running, tmp_path, f"killed-{at}", *PPO)
    assert run.struck(at, signal.SIGKILL) == -signal.SIGKILL
    assert run.drive().reason == "completed"
    assert run.facts("attempt")[-1].data["resumed_from"] is not None
    assert (run.outcome(), numbers(run)) == (calm.outcome(), numbers(calm))
    for file in sorted(critic_of(calm, STEPS).glob("*.safetensors")):
        assert file.read_bytes() == (critic_of(run, STEPS) / file.name).read_bytes()


@pytest.mark.system
def test_resume_within_the_warmup_continues_it(calm: Driven, running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "warming", *PPO)
    assert run.drive(steps=2).reason == run.drive(steps=STEPS).reason == "completed"
    steps = [record.data["metrics"]["updates"] for record in run.facts("step")]
    assert steps == [0.0] * WARM_UP + [2.0] * (STEPS - WARM_UP)
    assert numbers(run) == numbers(calm)


@pytest.mark.system
def test_a_fork_takes_the_critic_along(calm: Driven, running: Running, tmp_path: Path) -> None:
    start = str(critic_of(calm, STEPS).parent)
    for name, origin, updates in (("taken", start, 2), ("fresh", None, 0)):
        fork = Driven(running, tmp_path, name, *PPO, "trainer.steps=1")
        assert fork.drive(start_from=origin).reason == "completed"
        first = fork.facts("step")[0].data["metrics"]
        assert (first["updates"], bool(first["value"])) == (updates, origin is not None)


@pytest.mark.system
def test_a_critic_begins_where_there_was_none(running: Running, tmp_path: Path) -> None:
    run = Driven(running, tmp_path, "plain", "trainer.steps=1", "lora.dropout=0")
    assert run.drive().reason == "completed"
    assert not critic_of(run, 1).exists()
    fork = Driven(running, tmp_path, "critic", *PPO, "trainer.steps=1")
    assert fork.drive(start_from=str(critic_of(run, 1).parent)).reason == "completed"
    assert fork.facts("step")[0].data["metrics"]["updates"] == 0


@pytest.mark.system
@pytest.mark.parametrize(
    "override", [pytest.param("algorithm.group_size=1", marks=pytest.mark.long), "rollout.max_staleness=1"]
)
def test_other_settings_run_with_a_critic(running: Running, tmp_path: Path, override: str) -> None:
    first = (f"trainer.steps={WARM_UP + 1}", "eval.every=0")  # the last of them is the first of the policy
    run = Driven(running, tmp_path, override.partition("=")[0].replace(".", "-"), *PPO, *first, override)
    assert run.drive().reason == "completed"
    assert run.facts("step")[-1].data["metrics"]["updates"] > 0
