"""Verb four: gradients and optimizer steps on the samples."""

import math
from dataclasses import dataclass

import numpy as np

from lorad.driver.session import Rollout, Sample, Session, Weighed
from lorad.protocol.batch import Batch, LossStats, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward, Logprobs, LogprobsOf, Nothing, OptimStep, Stepped
from lorad.rl.correction import correction
from lorad.rl.levels import level_weights, normaliser
from lorad.rl.schedule import learning_rate
from lorad.spec.model import Spec

_ASYNC_CAP = 2.0  # of importance weights where sampling runs ahead; see `_importance_cap`


@dataclass(frozen=True)
class _Update:
    """stats: None where nothing was computed, or it was not finite. step: what the pool said of the
    optimizer's step, None where it made none. is_finite: False where loss or gradient was not, so that the
    update was skipped."""

    stats: LossStats | None = None
    step: Stepped | None = None
    is_finite: bool = True


@dataclass(frozen=True)
class _Mismatch:
    """|trainer - engine| log-probability of the same tokens under the same weights, nats: its mean and its
    maximum.
    """

    mean: float
    max: float


@dataclass(frozen=True)
class Trained:
    """What the updates of one step did.

    first: statistics of the first epoch.
    mismatch: None where it is not known.
    importance: float, of all trained tokens; None without algorithm.correction.
    """

    lr: float
    updates: list[_Update]
    first: LossStats
    mismatch: _Mismatch | None
    importance: np.ndarray | None = None

    @property
    def total(self) -> LossStats:
        return sum((update.stats for update in self.updates if update.stats is not None), LossStats())

    @property
    def steps(self) -> list[Stepped]:
        return [update.step for update in self.updates if update.step is not None]

    @property
    def skipped(self) -> int:
        """Updates whose loss or gradient was not finite."""
        return sum(not update.is_finite for update in self.updates)


@dataclass(frozen=True)
class _MiniBatch:
    """Groups that share one optimizer step. `normaliser` counts dropped groups too: dropping changes cost
    only.

    has_gradient: False where it is zero for certain: all advantages are 0, and there is no KL term.
    importance: float [T], see algorithm.correction; None without one.
    """

    batch: Batch
    targets: PolicyTargets
    normaliser: float
    has_gradient: bool
    importance: np.ndarray | None


def train(session: Session, rollout: Rollout, weighed: Weighed) -> Trained:
    """epochs x minibatches updates, as far as there is a gradient and it is finite."""
    algorithm, rate = session.spec.algorithm, _lr(session)
    with session.timed("train"):
        minibatches = _minibatches(session, rollout, weighed)
        measured = _measured(session, rollout) if _must_measure(session, rollout, minibatches) else None
        updates = [_update(session, m, rate) for _ in range(algorithm.epochs) for m in minibatches]
    early = [update.stats for update in updates[: len(minibatches)] if update.stats is not None]
    first = sum(early, LossStats())
    if measured is None and first.tokens and _is_current(session, rollout) and not _is_noisy(session.spec):
        measured = _Mismatch(first.sampler_difference / first.tokens, first.sampler_difference_max)
    weights = [m.importance for m in minibatches if m is not None and m.importance is not None]
    return Trained(rate, updates, first, measured, np.concatenate(weights) if weights else None)


def untrained(session: Session) -> Trained:
    """Return the result of a step in which nothing is trained."""
    return Trained(_lr(session), [], LossStats(), None)


def _lr(session: Session) -> float:
    """Return the learning rate of the step that is being made (the first step is number 0 to
    the schedule).
    """
    trainer = session.spec.trainer
    assert trainer.lr is not None  # chosen when the run was made
    return learning_rate(
        session.state.step,
        lr=trainer.lr,
        schedule=trainer.schedule,
        horizon=trainer.schedule_steps or session.params.steps,
        warmup_steps=trainer.warmup_steps,
        min_lr=trainer.min_lr,
    )


def _importance_cap(spec: Spec) -> float | None:
    """algorithm.importance_cap; without one, _ASYNC_CAP where samples may be of older versions than the
    trained one.

    The loss then is decoupled PPO: its clip is around the policy before the update, and exp(that - sampler),
    truncated, weighs what an older version sampled (Hilton et al., 2022, arXiv 2110.00641; AReaL, Fu et al.,
    2025, arXiv 2505.24298; truncation: Yao et al., 2025, "Your efficient RL framework secretly brings you
    off-policy training").
    """
    algorithm = spec.algorithm
    if algorithm.importance_cap is not None or algorithm.correction is not None:
        return algorithm.importance_cap
    is_off = algorithm.parts.anchor == "sampler"  # whose ratio weighs it already
    return None if is_off or not spec.rollout.max_staleness else _ASYNC_CAP


def _needs_old(spec: Spec) -> bool:
    """Return whether the policy before the update differs from that of the update's own forward pass.

    It does when there are several updates, or when importance weights would have the noise of dropout. A
    correction needs it beforehand.
    """
    algorithm = spec.algorithm
    if algorithm.correction is not None:
        return True
    is_weighed = _importance_cap(spec) is not None
    return algorithm.epochs > 1 or algorithm.minibatches > 1 or (is_weighed and spec.lora.dropout > 0)


def _is_current(session: Session, rollout: Rollout) -> bool:
    """Return whether the weights are those that sampled:
    else a difference of log-probabilities is staleness.
    """
    return rollout.plan.trained >= session.state.changed


def _is_noisy(spec: Spec) -> bool:
    """Return whether the log-probabilities of the update's forward pass are compared with the engine's and
    have dropout.
    """
    return spec.lora.dropout > 0 and not _needs_old(spec)


def _must_measure(session: Session, rollout: Rollout, minibatches: list[_MiniBatch | None]) -> bool:
    """Return whether the mismatch can be known, and the updates do not say it."""
    return _is_current(session, rollout) and (_is_noisy(session.spec) or not any(minibatches))


def _measured(session: Session, rollout: Rollout) -> _Mismatch:
    """Measure the mismatch on the first group only, which is cheap and enough for an alarm."""
    group = rollout.groups[0]
    batch = Batch.of([(_prompt(group), [s.tokens for s in group])])
    difference = np.abs(_logprobs(session, "slot", batch) - np.concatenate([s.logprobs for s in group]))
    return _Mismatch(float(difference.mean()), float(difference.max()))


def _update(session: Session, m: _MiniBatch | None, rate: float) -> _Update:
    """Do one update; without a gradient the optimizer makes no step (algorithm.skip_empty_updates).

    Adam's momentum and weight decay would move the weights by themselves. What is not finite changes nothing
    either.
    """
    skips = session.spec.algorithm.skip_empty_updates
    if m is None:
        return _Update(step=None if skips else _step(session, rate))
    stats = _gradient(session, m)
    if not math.isfinite(stats.loss) or (skips and not m.has_gradient):
        session.pool.call("discard_grads", Nothing())
        return _Update(stats) if math.isfinite(stats.loss) else _Update(is_finite=False)
    step = _step(session, rate)
    return _Update(stats, step) if step.applied else _Update(is_finite=False)


def policy_loss(spec: Spec) -> PolicyLoss:
    """Return the loss that the spec asks for."""
    a, parts = spec.algorithm, spec.algorithm.parts
    return PolicyLoss(
        surrogate=parts.surrogate,
        ratio=parts.ratio,
        anchor=parts.anchor,
        clip_low=parts.clip[0],
        clip_high=parts.clip[1],
        dual=parts.dual,
        bounds=parts.bounds,
        negative_bounds=parts.negative_bounds,
        kl_coef=a.kl.coef,
        kl_type=a.kl.type,
        importance_cap=_importance_cap(spec),
        temperature=spec.rollout.temperature,
    )


def _gradient(session: Session, m: _MiniBatch) -> LossStats:
    loss = policy_loss(session.spec)
    stats: LossStats = session.pool.call(
        "forward_backward", ForwardBackward(m.batch, m.targets, loss, m.normaliser)
    )
    return stats


def _step(session: Session, rate: float) -> Stepped:
    result: Stepped = session.pool.call("optim_step", OptimStep(rate, session.spec.trainer.max_grad_norm))
    return result


def _minibatches(session: Session, rollout: Rollout, weighed: Weighed) -> list[_MiniBatch | None]:
    """Contiguous runs of groups; None where no group of it is alive. Old and reference log-probabilities are
    taken before the first update."""
    count = min(session.spec.algorithm.minibatches, len(rollout.groups))
    size = session.spec.algorithm.group_size
    parts = np.array_split(np.arange(len(rollout.groups)), count)
    return [_minibatch(session, rollout, weighed, part.tolist(), size) for part in parts]


def _minibatch(
    session: Session, rollout: Rollout, weighed: Weighed, groups: list[int], size: int
) -> _MiniBatch | None:
    algorithm = session.spec.algorithm
    alive = [g for g in groups if weighed.alive[g]]
    if not alive:
        return None
    scored = {g: [i for i in range(size) if weighed.scored[g * size + i]] for g in groups}
    everything = [rollout.groups[g][i] for g in groups for i in scored[g]]
    samples = [rollout.groups[g][i] for g in alive for i in scored[g]]
    lengths = np.array([s.tokens.size for s in samples])
    advantages = np.repeat(weighed.advantages[[g * size + i for g in alive for i in scored[g]]], lengths)
    batch = Batch.of(
        [(_prompt(rollout.groups[g]), [rollout.groups[g][i].tokens for i in scored[g]]) for g in alive]
    )
    reference: LogprobsOf = "reference" if session.params.reference else "base"
    sampler = np.concatenate([s.logprobs for s in samples])
    old = _logprobs(session, "slot", batch) if _needs_old(session.spec) else None
    importance = None
    if (wanted := algorithm.correction) is not None and old is not None:
        importance = correction(old, sampler, lengths, wanted.kind, wanted.low, wanted.high)
        advantages = (advantages * importance).astype(np.float32)
    targets = PolicyTargets(
        advantages=advantages,
        sampler_logprobs=sampler,
        old_logprobs=old,
        reference_logprobs=_logprobs(session, reference, batch) if algorithm.kl.coef else None,
        weights=level_weights(lengths, algorithm.parts.level, batch.group_sizes),
    )
    total = normaliser(
        np.array([s.tokens.size for s in everything]),
        algorithm.parts.level,
        np.array([len(scored[g]) for g in groups]),
        length=session.spec.rollout.max_new_tokens,
    )
    return _MiniBatch(
        batch, targets, total, has_gradient=bool(algorithm.kl.coef or advantages.any()), importance=importance
    )


def _prompt(group: list[Sample]) -> np.ndarray:
    return np.array(group[0].example.tokens, np.int32)


def _logprobs(session: Session, of: LogprobsOf, batch: Batch) -> np.ndarray:
    args = Logprobs(of, batch, session.spec.rollout.temperature)
    result: np.ndarray = session.pool.call("logprobs", args).logprobs
    return result
