"""Which groups reach the trainer: not those whose rewards are all equal, unless a KL term gives them a
gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lorad.driver.begin import refuse_unknown_loss
from lorad.driver.rewards import Score
from lorad.driver.score import choose
from lorad.driver.session import Sample, Session, State, StepSelection, Weighed
from lorad.driver.train import adapt_kl, policy_loss
from lorad.driver.weigh import gather, weigh
from lorad.errors import Conflict
from lorad.protocol.batch import LOSSES, LossStats
from lorad.rl.data import Example
from lorad.spec.text import load_spec

SPEC = "{model: {path: builtin:tiny}, data: {train: sort, prompts_per_step: 3}, algorithm: {group_size: 2}}"
REWARDS = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Step:
    """What a step makes of rewards. alive: bool [groups], those that reach the trainer."""

    scored: StepSelection
    weighed: Weighed
    alive: list[bool]
    state: State


def step(
    *overrides: str,
    seconds: dict[str, float] | None = None,
    rewards: Sequence[float | None] = REWARDS,
    size: int = 2,
    lengths: Sequence[int] = (),
    finishes: Sequence[str] = (),
    old: float = 0.0,
    reference: float = 0.0,
) -> Step:
    """Three tokens each unless `lengths` says otherwise. old, reference: log-probabilities of all tokens."""
    spec = load_spec(SPEC, overrides=overrides)
    session: Any = SimpleNamespace(spec=spec, seconds={} if seconds is None else seconds, state=State())
    session.timed = lambda verb: Session.timed(session, verb)
    session.params, session.kl_coef = SimpleNamespace(reference=None), spec.algorithm.kl.coef

    def call(verb: str, args: Any) -> Any:
        assert verb == "logprobs"
        value = old if args.of == "slot" else reference
        return SimpleNamespace(logprobs=np.full(args.batch.completions.size, value, np.float32))

    session.pool = SimpleNamespace(call=call)
    example = Example("one", "", "", [1, 2], {})
    samples = [
        Sample(example, 0, "run@0", np.zeros(length, np.int32), np.zeros(length, np.float32), finish, text="")
        for length, finish in zip(
            lengths or [3] * len(rewards), finishes or ["stop"] * len(rewards), strict=True
        )
    ]
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    rollout: Any = SimpleNamespace(groups=groups, samples=samples)
    scored = choose(cast(Session, session), rollout, [Score(reward) for reward in rewards])
    known = gather(cast(Session, session), rollout, scored)
    found = weigh(cast(Session, session), rollout, scored, known)
    return Step(scored, found, [group in known.groups for group in range(len(groups))], session.state)


def test_groups_without_gradient_are_dropped() -> None:
    found = step()
    assert found.alive == [False, True, False]
    advantages = found.weighed.advantages
    assert not advantages[[0, 1, 4, 5]].any() and advantages[[2, 3]].all()


@pytest.mark.parametrize("override", ["algorithm.kl.coef=0.1", "algorithm.drop_zero_variance=false"])
def test_kl_or_the_spec_keeps_groups_without_gradient(override: str) -> None:
    assert all(step(override).alive)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_failed_rewards_count_in_no_mean_or_gradient(kl: float) -> None:
    found = step(
        f"algorithm.kl.coef={kl}", rewards=(-1.0, None, -3.0, None, -1.0, None, None, None, None), size=3
    )
    rewards, nan = found.scored.rewards, float("nan")
    assert rewards.tolist() == [-1.0, -3.0, -1.0] and rewards.mean() < -1.5
    wanted = [0.7071, nan, -0.7071, nan, 0, nan, nan, nan, nan]
    assert found.weighed.advantages.tolist() == pytest.approx(wanted, abs=1e-3, nan_ok=True)
    assert found.alive == [True, False, False] and found.scored.flat.tolist() == [False, True, True]


def test_the_verb_is_timed_as_the_others_are() -> None:
    seconds: dict[str, float] = {}
    step(seconds=seconds)
    assert seconds["weigh"] > 0.0


@pytest.mark.parametrize(
    ("overrides", "unknown"),
    [
        (("algorithm.name=gspo",), "ratio:sequence"),
        (("algorithm={kl: {coef: 0.1, type: k2}}",), "kl:k2"),
        (("algorithm.name=gmpo", "data.train=lookup", "env.name=lookup"), "ratio:given"),
    ],
)
def test_pool_that_lacks_the_loss_is_refused(overrides: tuple[str, ...], unknown: str) -> None:
    spec = load_spec(SPEC, overrides=overrides)
    session: Any = SimpleNamespace(spec=spec, params=SimpleNamespace(run="a"), judged=[])
    session.judged.append(SimpleNamespace(hosts=spec.env.name))
    info: Any = SimpleNamespace(pool="tiny-1", losses=LOSSES)
    refuse_unknown_loss(session, info)
    info.losses = tuple(term for term in LOSSES if term != unknown)
    with pytest.raises(Conflict, match=f"pool tiny-1 does not know {unknown}") as refused:
        refuse_unknown_loss(session, info)
    assert "lorad pools stop tiny-1" in refused.value.hint


def test_rewards_are_compared_as_the_algorithm_says() -> None:
    plain = step("algorithm.name=reinforce", rewards=(1.0, 1.0, 0.5, 0.0))
    assert plain.weighed.advantages.tolist() == [1.0, 1.0, 0.5, 0.0] and all(plain.alive)
    others = step("algorithm.name=rloo", rewards=(1.0, 1.0, 0.5, 0.0))
    assert others.weighed.advantages.tolist() == [0.0, 0.0, 0.5, -0.5] and others.alive == [False, True]


def test_moving_baseline_is_the_mean_before() -> None:
    found = step("algorithm={name: reinforce, baseline: moving}", rewards=(1.0, 1.0, 0.5, 0.0))
    assert found.weighed.advantages.tolist() == pytest.approx([0.375, 0.375, -0.125, -0.625])
    assert found.state.baseline == pytest.approx(0.625)


def test_penalty_of_a_sample_lowers_its_reward() -> None:
    found = step(
        "algorithm={name: rloo, kl: {coef: 0.1}}", rewards=(1.0, 0.0), lengths=(3, 1), old=0.5, reference=-0.5
    )
    assert found.weighed.kl == pytest.approx(1.0)
    assert found.weighed.advantages.tolist() == pytest.approx([0.8, -0.8])
    assert found.weighed.targets.reference_logprobs is None


def test_each_token_bears_the_penalties_after_it() -> None:
    found = step(
        "algorithm={name: reinforce++, scale: one, kl: {coef: 0.1}}",
        rewards=(1.0, 0.0),
        lengths=(3, 1),
        old=0.5,
        reference=-0.5,
    )
    assert found.weighed.targets.advantages.tolist() == pytest.approx([0.7, 0.8, 0.9, -0.1])
    whitened = step("algorithm={name: reinforce++, kl: {coef: 0.1}}", rewards=(1.0, 0.0), old=0.5)
    tokens = whitened.weighed.targets.advantages
    assert tokens.mean() == pytest.approx(0, abs=1e-6) and tokens.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_teacher_alone_weighs_tokens() -> None:
    """Whatever the rewards are, also where they failed. The sampler's log-probabilities are 0 here."""
    distill = "algorithm={name: distill, kl: {reference: a@1, coef: 2.0}"
    found = step(distill + "}", rewards=(1.0, None), lengths=(2, 1), old=9.0, reference=-0.5)
    assert found.weighed.targets.advantages.tolist() == pytest.approx([-1.0] * 3)
    assert found.weighed.kl == pytest.approx(0.5) and found.weighed.targets.old_logprobs is None
    both = step(distill + ", reward_coef: 4.0}", rewards=(1.0, 0.0), lengths=(2, 1), reference=-0.5)
    assert both.weighed.targets.advantages.tolist() == pytest.approx([1.0, 1.0, -3.0])


def test_masked_samples_count_in_the_baseline_alone() -> None:
    found = step("algorithm={scale: one, truncated: mask}", rewards=(1.0, 0.0), finishes=("stop", "length"))
    assert found.weighed.training.rows.tolist() == [0] and found.scored.counted.tolist() == [True, False]
    assert found.weighed.targets.advantages.tolist() == [0.5] * 3


def test_truncated_and_long_samples_cost_reward() -> None:
    penalised = step("algorithm.truncated=penalise", rewards=(1.0, 1.0), finishes=("stop", "length"))
    assert penalised.scored.worth.tolist() == [1.0, 0.0] and penalised.alive == [True]
    overlong = step(
        "algorithm={name: dapo, overlong: {buffer: 4}}", rewards=(1.0, 1.0, 1.0), lengths=(12, 14, 16), size=3
    )
    assert overlong.scored.worth.tolist() == [1.0, 0.5, 0.0]
    assert overlong.scored.rewards.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("override", "rows"),
    [
        ("algorithm={name: rft}", [0]),
        ("algorithm={name: rft, best: 2}", [0, 1]),
        ("algorithm={name: rft, least: 0.5}", [0, 1, 3, 4, 5]),
        ("algorithm={name: rft, least: 0.5, best: 1}", [0, 3]),
    ],
)
def test_rft_imitates_the_best_samples(override: str, rows: list[int]) -> None:
    found = step(override, rewards=(1.0, 1.0, 0.0, 1.0, 1.0, 1.0), size=3)
    assert found.weighed.training.rows.tolist() == rows
    assert set(found.weighed.targets.advantages.tolist()) == {1.0}
    assert np.flatnonzero(found.scored.counted).tolist() == rows


def test_kl_coefficient_moves_towards_its_target() -> None:
    session: Any = SimpleNamespace(
        spec=load_spec(SPEC, overrides=["algorithm.kl={coef: 0.1, target: 0.5, horizon: 100}"]),
        state=State(),
        kl_coef=0.1,
    )
    weighed: Any = SimpleNamespace(kl=None, training=SimpleNamespace(rows=np.arange(10)))
    trained: Any = SimpleNamespace(first=LossStats(tokens=10, kl=10.0))
    adapt_kl(session, trained, weighed)
    assert session.state.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))


@pytest.mark.parametrize(
    ("algorithm", "cap"),
    [("{}", 2.0), ("{importance_cap: 3.0}", 3.0), ("{correction: {}}", None), ("{name: dppo}", None)],
)
def test_stale_samples_are_weighed_once(algorithm: str, cap: float | None) -> None:
    ahead = load_spec(f"{{algorithm: {algorithm}, rollout: {{max_staleness: 1}}}}")
    assert policy_loss(ahead).importance_cap == cap


def test_other_programs_have_importance_weights() -> None:
    apart = "trainer: {backend: fsdp}"
    assert policy_loss(load_spec(f"{{{apart}}}")).importance_cap == 2.0
    assert policy_loss(load_spec(f"{{{apart}, algorithm: {{name: rft}}}}")).importance_cap is None
    assert policy_loss(load_spec("{}")).importance_cap is None
