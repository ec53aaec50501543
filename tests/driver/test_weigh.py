"""Which groups reach the trainer: not those whose rewards are all equal, unless a KL term gives them a
gradient.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lorad.driver.begin import refuse_unknown_loss
from lorad.driver.rewards import Score
from lorad.driver.score import weigh
from lorad.driver.session import Session, Weighed
from lorad.driver.train import policy_loss
from lorad.errors import Conflict
from lorad.protocol.batch import LOSSES
from lorad.spec.text import load_spec

SPEC = "{model: {path: builtin:tiny}, data: {train: sort, prompts_per_step: 3}, algorithm: {group_size: 2}}"
REWARDS = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


def weighed(
    *overrides: str,
    seconds: dict[str, float] | None = None,
    rewards: Sequence[float | None] = REWARDS,
    size: int = 2,
) -> Weighed:
    session: Any = SimpleNamespace(
        spec=load_spec(SPEC, overrides=overrides), seconds={} if seconds is None else seconds
    )
    session.timed = lambda verb: Session.timed(session, verb)
    samples = [SimpleNamespace(tokens=np.zeros(3, np.int32))] * len(rewards)
    rollout: Any = SimpleNamespace(groups=[[None] * size] * (len(rewards) // size), samples=samples)
    return weigh(cast(Session, session), rollout, [Score(reward) for reward in rewards])


def test_groups_without_gradient_are_dropped() -> None:
    found = weighed()
    assert found.alive.tolist() == [False, True, False]
    assert not found.advantages[[0, 1, 4, 5]].any() and found.advantages[[2, 3]].all()


@pytest.mark.parametrize("override", ["algorithm.kl.coef=0.1", "algorithm.drop_zero_variance=false"])
def test_kl_or_the_spec_keeps_groups_without_gradient(override: str) -> None:
    assert weighed(override).alive.all()


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_failed_rewards_count_in_no_mean_or_gradient(kl: float) -> None:
    found = weighed(
        f"algorithm.kl.coef={kl}", rewards=(-1.0, None, -3.0, None, -1.0, None, None, None, None), size=3
    )
    assert found.rewards.tolist() == [-1.0, -3.0, -1.0] and found.rewards.mean() < -1.5
    assert found.advantages.tolist() == pytest.approx([0.7071, 0, -0.7071, 0, 0, 0, 0, 0, 0], abs=1e-3)
    assert found.alive.tolist() == [True, False, False] and found.flat.tolist() == [False, True, True]


def test_the_verb_is_timed_as_the_others_are() -> None:
    seconds: dict[str, float] = {}
    weighed(seconds=seconds)
    assert seconds["weigh"] > 0.0


@pytest.mark.parametrize(
    ("override", "unknown"),
    [("algorithm.name=gspo", "ratio:sequence"), ("algorithm={kl: {coef: 0.1, type: k2}}", "kl:k2")],
)
def test_pool_that_lacks_the_loss_is_refused(override: str, unknown: str) -> None:
    session: Any = SimpleNamespace(
        spec=load_spec(SPEC, overrides=[override]), params=SimpleNamespace(run="a")
    )
    info: Any = SimpleNamespace(pool="tiny-1", losses=LOSSES)
    refuse_unknown_loss(session, info)
    info.losses = tuple(term for term in LOSSES if term != unknown)
    with pytest.raises(Conflict, match=f"pool tiny-1 does not know {unknown}") as refused:
        refuse_unknown_loss(session, info)
    assert "lorad pools stop tiny-1" in refused.value.hint


def test_rewards_are_compared_as_the_algorithm_says() -> None:
    plain = weighed("algorithm.name=reinforce", rewards=(1.0, 1.0, 0.5, 0.0))
    assert plain.advantages.tolist() == [1.0, 1.0, 0.5, 0.0] and plain.alive.all()
    others = weighed("algorithm.name=rloo", rewards=(1.0, 1.0, 0.5, 0.0))
    assert others.advantages.tolist() == [0.0, 0.0, 0.5, -0.5] and others.alive.tolist() == [False, True]


@pytest.mark.parametrize(
    ("algorithm", "cap"),
    [("{}", 2.0), ("{importance_cap: 3.0}", 3.0), ("{correction: {}}", None), ("{name: dppo}", None)],
)
def test_stale_samples_are_weighed_once(algorithm: str, cap: float | None) -> None:
    ahead = load_spec(f"{{algorithm: {algorithm}, rollout: {{max_staleness: 1}}}}")
    assert policy_loss(ahead).importance_cap == cap
