"""Verb four: gradients and optimizer steps on the samples."""

from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from lorad.driver import critic
from lorad.driver.critic import CriticUpdate
from lorad.driver.sampling.rows import batch_of
from lorad.driver.session import Rollout, Session, StepSelection, Weighed
from lorad.driver.update import Update, current_rate, update
from lorad.driver.weigh import importance_cap, logprobs, minibatch_ranges, needs_old, within
from lorad.protocol.batch import Batch, LossStats, PolicyLoss, PolicyTargets, ValueTargets
from lorad.protocol.calls import ForwardBackward, Stepped
from lorad.protocol.heartbeat import HEART
from lorad.rl.levels import normaliser
from lorad.rl.user.functions import LossInput
from lorad.spec.model import Spec


@dataclass(frozen=True)
class _Mismatch:
    """Mean and maximum of |trainer - engine|, nats, of log-probabilities of equal tokens and weights."""

    mean: float
    max: float


@dataclass(frozen=True)
class Trained:
    """The updates of one step.

    first: statistics of the first epoch.
    mismatch: None where it is not known.
    critic: updates of the critic; none without one.
    """

    lr: float
    updates: list[Update]
    first: LossStats
    mismatch: _Mismatch | None
    critic: list[CriticUpdate] = field(default_factory=list)

    @property
    def total(self) -> LossStats:
        return sum((update.stats for update in self.updates if update.stats is not None), LossStats())

    @property
    def steps(self) -> list[Stepped]:
        return [update.step for update in self.updates if update.step is not None]

    @property
    def skipped(self) -> int:
        """Return how many updates had a loss or gradient that was not finite."""
        every: list[Update | CriticUpdate] = [*self.updates, *self.critic]
        return sum(not update.is_finite for update in every)


@dataclass(frozen=True)
class _MiniBatch:
    """Groups that share one optimizer step.

    normaliser: counts dropped groups too, as dropping changes cost only.
    lengths: int [S], sampled tokens of each sample.
    sizes: int [G], samples of each group.
    has_gradient: False where it is zero for certain: all advantages are 0, and nothing else acts.
    critic: the critic's targets; None without one.
    """

    batch: Batch
    targets: PolicyTargets
    normaliser: float
    lengths: np.ndarray
    sizes: np.ndarray
    has_gradient: bool
    critic: ValueTargets | None = None


def train(session: Session, rollout: Rollout, scored: StepSelection, weighed: Weighed) -> Trained:
    """Make epochs x minibatches updates of the policy and of its critic.

    An update is left out without a gradient, or with one that is not finite; the policy's while the critic
    warms up.
    """
    rate = current_rate(session)
    # else a difference of log-probabilities is staleness
    is_current = rollout.plan.trained >= session.state.changed
    # log-probabilities of the update's forward pass are compared with the engine's, and have dropout
    is_noisy = session.spec.lora.dropout > 0 and not needs_old(session.spec)
    with session.timed("train"):
        ranges = minibatch_ranges(session.spec, rollout)  # of contiguous groups
        minibatches = [_minibatch(session, rollout, scored, weighed, *groups) for groups in ranges]
        updates_say_it = any(minibatches) and not is_noisy and not critic.is_warming(session)
        measured: _Mismatch | None = None
        nonempty = [[sample for sample in group if sample.size] for group in rollout.groups]
        if is_current and not updates_say_it and (group := next(filter(None, nonempty), None)):
            # the first group that has any token, which is cheap and enough for an alarm
            sampled = np.concatenate([sample.logprobs for sample in group])
            difference = np.abs(logprobs(session, "slot", batch_of([group])) - sampled)
            measured = _Mismatch(float(difference.mean()), float(difference.max()))
        updates: list[Update] = []
        criticised: list[CriticUpdate] = []
        for place, minibatch in enumerate(passes := minibatches * session.spec.algorithm.epochs, 1):
            if len(passes) > 1:
                HEART.tell(f"training {place} of {len(passes)}")
            if not critic.is_warming(session):
                is_first = not any(update.step for update in updates)
                updates.append(_update(session, minibatch, rate, is_first=is_first))
            if minibatch is not None and minibatch.critic is not None:
                criticised.append(critic.update(session, minibatch.batch, minibatch.critic))
    early = [update.stats for update in updates[: len(minibatches)] if update.stats is not None]
    first = sum(early, LossStats())
    if measured is None and first.tokens and is_current and not is_noisy:
        measured = _Mismatch(first.sampler_difference / first.tokens, first.sampler_difference_max)
    return Trained(rate, updates, first, measured, criticised)


def adapt_kl(session: Session, trained: Trained, weighed: Weighed) -> None:
    """Move the coefficient of the KL penalty towards algorithm.kl.target (Ziegler et al., 2019)."""
    kl = session.spec.algorithm.kl
    first = trained.first
    seen = weighed.kl if weighed.kl is not None or not first.tokens else first.kl / first.tokens
    if kl.target is None or seen is None:
        return
    error = min(max(seen / kl.target - 1, -0.2), 0.2)
    session.state.kl_coef = session.kl_coef * (1 + error * weighed.training.rows.size / kl.horizon)


def _update(session: Session, m: _MiniBatch | None, rate: float, *, is_first: bool) -> Update:
    """Do one update. is_first: the weights are as before the step."""
    if m is None:
        return update(session, None, rate)
    shown: float | None = None
    if session.spec.algorithm.loss:
        m, shown = _with_own_loss(session, m, is_first=is_first)
    loss = policy_loss(session.spec, session.kl_coef)
    if loss.ratio != "token" and m.batch.completion_lengths.size > m.lengths.size:
        # of each whole sample, of which a trainer may see but one row at a time
        targets = m.targets
        if is_first and loss.anchor == "old":  # the policies that are compared are one
            log_ratios = np.zeros_like(targets.advantages)
        else:
            now = targets.old_logprobs if is_first else None
            now = logprobs(session, "slot", m.batch) if now is None else now
            anchor = targets.sampler_logprobs if loss.anchor == "sampler" else targets.old_logprobs
            anchor = now if anchor is None else anchor
            log_ratios = sequence_log_ratios(now, anchor, targets, loss, m.lengths)
        m = replace(m, targets=structs.replace(targets, sequence_log_ratios=log_ratios))
    work = ForwardBackward(m.batch, m.targets, loss, m.normaliser)
    done = update(session, work, rate, has_gradient=m.has_gradient)
    if shown is None or done.stats is None:
        return done
    return replace(done, stats=structs.replace(done.stats, loss=shown + done.stats.loss))


def policy_loss(spec: Spec, kl_coef: float | None = None) -> PolicyLoss:
    """Return the loss that the spec asks for. kl_coef: the adapted one; None: the spec's."""
    a = spec.algorithm
    parts = spec.algorithm.parts
    coef = a.kl_coef if kl_coef is None else kl_coef
    loss = PolicyLoss(
        surrogate="linear",
        kl_coef=coef if a.kl_place == "loss" else 0.0,
        kl_type=a.kl_type,
        entropy_coef=a.entropy_coef,
        temperature=spec.rollout.temperature,
    )
    if a.loss:
        return loss
    return structs.replace(
        loss,
        surrogate="linear" if parts.surrogate == "nll" else parts.surrogate,
        ratio=parts.ratio,
        anchor=parts.anchor,
        clip_low=parts.clip[0],
        clip_high=parts.clip[1],
        dual=parts.dual,
        bounds=parts.bounds,
        negative_bounds=parts.negative_bounds,
        importance_cap=importance_cap(spec),
    )


def sequence_log_ratios(
    now: np.ndarray, anchor: np.ndarray, targets: PolicyTargets, loss: PolicyLoss, lengths: np.ndarray
) -> np.ndarray:
    """Return what `sequence_ratios` of lorad/rl/loss.py computes where each row is a sample; float32 [M].

    now, anchor: float32 [M], log-probabilities.
    lengths: int [S], sampled tokens of each sample, which sum to M.
    """
    log_ratio = now.astype(np.float64) - anchor
    if loss.ratio == "geometric":
        sign = np.sign(targets.advantages)
        clipped = log_ratio.clip(-loss.clip_low, loss.clip_high)
        log_ratio = sign * np.minimum(sign * log_ratio, sign * clipped)
    owner = np.repeat(np.arange(lengths.size), lengths)
    trained = np.ones(now.size) if targets.weights is None else (targets.weights > 0).astype(np.float64)
    counts = np.bincount(owner, trained, minlength=lengths.size).clip(min=1)
    sums = np.bincount(owner, log_ratio * trained, minlength=lengths.size)
    means: np.ndarray = (sums / counts)[owner].astype(np.float32)
    return means


def _with_own_loss(session: Session, m: _MiniBatch, *, is_first: bool) -> tuple[_MiniBatch, float | None]:
    """Give `linear` the advantages with which its gradient is that of the user's loss. Raises SpecError.

    Returns what makes the user's loss of the loss that the trainer reports; None where the user's has no
    value.
    """
    targets = m.targets
    own = session.own.loss
    weights = targets.weights
    sampler = targets.sampler_logprobs
    old = targets.old_logprobs
    assert own is not None and weights is not None and sampler is not None and old is not None
    now = old if is_first else logprobs(session, "slot", m.batch)
    values = LossInput(
        logprobs=now,
        sampler=sampler,
        old=old,
        ref=targets.reference_logprobs,
        advantages=targets.advantages,
        mask=weights > 0,
        lengths=m.lengths,
        groups=m.sizes,
    )
    value, derivative = own.derivatives(values, session.spec.seed)
    derivative = np.where(weights > 0, derivative, 0.0)
    scaled = np.divide(-derivative * m.normaliser, weights, where=weights > 0, out=np.zeros(now.size))
    return replace(
        m,
        targets=structs.replace(targets, advantages=scaled.astype(np.float32)),
        has_gradient=_has_terms(session.spec) or bool(derivative.any()),
    ), None if value is None else value - float(derivative @ now)


def _has_terms(spec: Spec) -> bool:
    """Return whether the loss has a gradient beside that of the surrogate."""
    algorithm = spec.algorithm
    return bool(algorithm.kl_coef and algorithm.kl_place == "loss") or algorithm.entropy_coef > 0


def _minibatch(
    session: Session, rollout: Rollout, scored: StepSelection, weighed: Weighed, first: int, end: int
) -> _MiniBatch | None:
    """Return the mini-batch of the groups from `first` to before `end`; None where none is trained."""
    training = weighed.training
    inside = within(training.groups, first, end)
    if inside.start == inside.stop:
        return None
    tokens = training.tokens(inside)
    targets = weighed.targets.part(tokens)
    sizes = [len(group) for group in rollout.groups]
    places = slice(sum(sizes[:first]), sum(sizes[:end]))
    counted = scored.counted[places]
    lengths = np.array([s.size for s in rollout.samples[places]])[counted]
    owner = np.repeat(np.arange(end - first), sizes[first:end])
    total = normaliser(
        lengths,
        session.spec.algorithm.parts.level,
        np.bincount(owner[counted], minlength=end - first),
        length=session.spec.rollout.max_new_tokens,
    )
    return _MiniBatch(
        training.part(inside),
        targets,
        total,
        training.lengths[training.samples(inside)],
        training.sizes[inside],
        has_gradient=_has_terms(session.spec) or bool(targets.advantages.any()),
        critic=None if weighed.critic is None else weighed.critic.part(tokens),
    )
