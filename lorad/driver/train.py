"""Verb four: gradients and optimizer steps on the samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lorad.driver.session import Rollout, Sample, Session, Weighed
from lorad.errors import LoradError
from lorad.protocol.batch import Batch, LossStats, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward, Logprobs, LogprobsOf, OptimStep, Stepped
from lorad.rl.schedule import learning_rate
from lorad.specs import Spec

ASYNC_CAP = 2.0  # of importance weights where sampling runs ahead; see `importance_cap`


@dataclass(frozen=True)
class Trained:
    """What the updates of one step did. steps: what the pool told of each. first: statistics before any update."""

    first: LossStats
    total: LossStats
    grad_norm: float
    lr: float
    steps: list[Stepped]

    @property
    def updates(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class MiniBatch:
    """Groups that share one optimizer step. `normaliser` counts dropped groups too: dropping changes cost only."""

    batch: Batch
    targets: PolicyTargets
    normaliser: float


def train(session: Session, rollout: Rollout, weighed: Weighed) -> Trained:
    """epochs x minibatches updates. Raises LoradError when a gradient is not finite."""
    algorithm, rate = session.spec.algorithm, lr(session)
    with session.timed("train"):
        minibatches = _minibatches(session, rollout, weighed)
        first, total, steps = LossStats(), LossStats(), list[Stepped]()
        for epoch in range(algorithm.epochs):
            for minibatch in minibatches:
                stats = LossStats() if minibatch is None else _update(session, minibatch)
                steps.append(_step(session, rate))  # also without a gradient: Adam's moments and weight decay go on
                total += stats
                first += stats if epoch == 0 else LossStats()
    return Trained(first, total, sum(step.grad_norm for step in steps) / len(steps), rate, steps)


def lr(session: Session) -> float:
    """The learning rate of the step that is being made (the first step is number 0 to the schedule)."""
    trainer = session.spec.trainer
    return learning_rate(
        session.state.step,
        lr=trainer.lr,
        schedule=trainer.schedule,
        horizon=trainer.schedule_steps or session.params.steps,
        warmup_steps=trainer.warmup_steps,
        min_lr=trainer.min_lr,
    )


def importance_cap(spec: Spec) -> float | None:
    """algorithm.importance_cap; without one, ASYNC_CAP where samples may be of older versions than the trained one.

    The loss then is decoupled PPO: its clip is around the policy before the update, and exp(that - sampler), truncated,
    weighs what an older version sampled (Hilton et al., 2022, arXiv 2110.00641; AReaL, Fu et al., 2025, arXiv
    2505.24298; truncation: Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy training").
    """
    cap = spec.algorithm.importance_cap
    return ASYNC_CAP if cap is None and spec.rollout.max_staleness else cap


def needs_old(spec: Spec) -> bool:
    """Whether the policy before the update is another than that of the update's own forward pass: there are several
    updates, or importance weights would have the noise of dropout."""
    algorithm = spec.algorithm
    is_weighed = importance_cap(spec) is not None
    return algorithm.epochs > 1 or algorithm.minibatches > 1 or (is_weighed and spec.lora.dropout > 0)


def _update(session: Session, m: MiniBatch) -> LossStats:
    a = session.spec.algorithm
    loss = PolicyLoss(
        clip_low=a.clip[0],
        clip_high=a.clip[1],
        kl_coef=a.kl.coef,
        kl_type=a.kl.type,
        level=a.loss_level,
        importance_cap=importance_cap(session.spec),
        temperature=session.spec.rollout.temperature,
    )
    stats: LossStats = session.pool.call("forward_backward", ForwardBackward(m.batch, m.targets, loss, m.normaliser))
    return stats


def _step(session: Session, rate: float) -> Stepped:
    result: Stepped = session.pool.call("optim_step", OptimStep(rate, session.spec.trainer.max_grad_norm))
    if not result.applied:
        raise LoradError(
            f"the gradient of step {session.state.step + 1} is not finite; the step was not applied",
            hint=f"Resume from a checkpoint with a smaller trainer.lr: `lorad checkpoints {session.params.run}`.",
        )
    return result


def _minibatches(session: Session, rollout: Rollout, weighed: Weighed) -> list[MiniBatch | None]:
    """Contiguous runs of groups; None where no group of it is alive. Old and reference log-probabilities are taken
    before the first update."""
    count = min(session.spec.algorithm.minibatches, len(rollout.groups))
    size = session.spec.algorithm.group_size
    parts = np.array_split(np.arange(len(rollout.groups)), count)
    return [_minibatch(session, rollout, weighed, part.tolist(), size) for part in parts]


def _minibatch(session: Session, rollout: Rollout, weighed: Weighed, groups: list[int], size: int) -> MiniBatch | None:
    algorithm = session.spec.algorithm
    alive = [g for g in groups if weighed.alive[g]]
    if not alive:
        return None
    everything = [s for g in groups for s in rollout.groups[g]]
    samples = [s for g in alive for s in rollout.groups[g]]
    rows = np.concatenate([np.arange(g * size, (g + 1) * size) for g in alive])
    batch = Batch.of([(_prompt(rollout.groups[g]), [s.tokens for s in rollout.groups[g]]) for g in alive])
    reference: LogprobsOf = "reference" if session.params.reference else "base"
    targets = PolicyTargets(
        advantages=weighed.advantages[rows],
        sampler_logprobs=np.concatenate([s.logprobs for s in samples]),
        old_logprobs=_logprobs(session, "slot", batch) if needs_old(session.spec) else None,
        reference_logprobs=_logprobs(session, reference, batch) if algorithm.kl.coef else None,
    )
    tokens = sum(s.tokens.size for s in everything)
    return MiniBatch(batch, targets, float(tokens if algorithm.loss_level == "token" else len(everything)))


def _prompt(group: list[Sample]) -> np.ndarray:
    return np.array(group[0].example.tokens, np.int32)


def _logprobs(session: Session, of: LogprobsOf, batch: Batch) -> np.ndarray:
    args = Logprobs(of, batch, session.spec.rollout.temperature)
    result: np.ndarray = session.pool.call("logprobs", args).logprobs
    return result
