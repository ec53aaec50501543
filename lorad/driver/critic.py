"""The critic of a run: what it makes of the samples, what that makes of the advantages, and its updates."""

import math
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from lorad.driver.session import Session, TrainBatch
from lorad.protocol.batch import Batch, LossStats, ValueLoss, ValueTargets
from lorad.protocol.calls import OptimStep, Stepped, ValueBackward, Values
from lorad.rl.advantage import whiten
from lorad.rl.gae import explained_variance, gae


@dataclass(frozen=True)
class CriticUpdate:
    """One update of the critic; nothing was applied where loss or gradient was not finite."""

    stats: LossStats
    step: Stepped

    @property
    def is_finite(self) -> bool:
        return self.step.applied and math.isfinite(self.stats.loss)


def is_warming(session: Session) -> bool:
    """Return whether the critic learns alone in this step."""
    algorithm = session.spec.algorithm
    return algorithm.has_critic and session.state.critic_steps < algorithm.critic.warmup_steps


def values(session: Session, batch: Batch) -> np.ndarray:
    """Return the critic's values, float32 [T]. It routes by itself, not as the engine did."""
    estimates: np.ndarray = session.pool.call("values", Values(replace(batch, routes=None))).values
    return estimates


def estimate(
    session: Session, training: TrainBatch, worth: np.ndarray, penalty: np.ndarray | None
) -> tuple[np.ndarray, ValueTargets]:
    """Return the advantages, float32 [T], and the critic's targets.

    worth: float [S], the worth of each sample at its end.
    penalty: float [T], subtracted from the reward of each token; None for no penalty.
    """
    algorithm = session.spec.algorithm
    lengths = training.lengths
    before = np.zeros(0, np.float32) if training.values is None else training.values
    rewards = np.zeros(before.size) if penalty is None else -penalty
    rewards[np.cumsum(lengths) - 1] += worth
    advantages, returns = gae(rewards, before, lengths, algorithm.gamma, algorithm.lam)
    if algorithm.parts.scale == "whiten" and advantages.size:
        advantages = whiten(advantages)
    return advantages.astype(np.float32), ValueTargets(returns.astype(np.float32), before)


def update(session: Session, batch: Batch, targets: ValueTargets) -> CriticUpdate:
    """Make one optimizer step on the mean over tokens; a gradient that is not finite changes nothing."""
    algorithm = session.spec.algorithm
    trainer = session.spec.trainer
    batch = replace(batch, routes=None)
    work = ValueBackward(batch, targets, ValueLoss(algorithm.value_clip), float(batch.targets.size))
    rate = algorithm.critic.lr or trainer.lr
    assert rate is not None  # chosen when the run was made
    stats: LossStats = session.pool.call("value_backward", work)
    step: Stepped = session.pool.call("optim_step", OptimStep(rate, trainer.max_grad_norm, "critic"))
    return CriticUpdate(stats, step)


def metrics(
    training: TrainBatch, targets: ValueTargets | None, updates: list[CriticUpdate]
) -> dict[str, float]:
    """Return what was measured of the critic, as lorad/records/metrics.py explains."""
    figures: dict[str, float] = {}
    if targets is not None and targets.values.size:
        lengths = training.lengths
        figures["value"] = float(targets.values[np.cumsum(lengths) - lengths].mean())
        explained = explained_variance(targets.values, targets.returns)
        figures |= {} if math.isnan(explained) else {"explained_variance": explained}
    if done := [update for update in updates if update.is_finite]:
        figures["value_loss"] = sum(update.stats.loss for update in done) / len(done)
        tokens = sum(update.stats.tokens for update in done)
        figures["value_clip_fraction"] = sum(update.stats.clipped for update in done) / tokens
        figures["critic_grad_norm"] = sum(update.step.grad_norm for update in done) / len(done)
    return figures
