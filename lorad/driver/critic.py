"""The critic of a run: what it makes of the samples, what that makes of the advantages, and its updates."""

import math
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from lorad.driver.session import Known, Session
from lorad.protocol.batch import Batch, LossStats, ValueLoss, ValueTargets
from lorad.protocol.calls import OptimStep, Stepped, ValueBackward, Values
from lorad.rl.advantage import whiten
from lorad.rl.gae import explained_variance, gae


@dataclass(frozen=True)
class CriticUpdate:
    """is_finite: False where loss or gradient was not, so that nothing was applied."""

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
    """float32 [T]. A critic's routes are its own."""
    found: np.ndarray = session.pool.call("values", Values(replace(batch, routes=None))).values
    return found


def estimate(
    session: Session, known: Known, worth: np.ndarray, penalty: np.ndarray | None
) -> tuple[np.ndarray, ValueTargets]:
    """(advantages, float32 [T], what the critic is to learn). worth: [S], what each sample is worth at its
    end. penalty: [T], taken from the reward of each token; None: nothing is.
    """
    algorithm, lengths = session.spec.algorithm, known.lengths
    before = np.zeros(0, np.float32) if known.values is None else known.values
    rewards = np.zeros(before.size) if penalty is None else -penalty
    rewards[np.cumsum(lengths) - 1] += worth
    found, returns = gae(rewards, before, lengths, algorithm.gamma, algorithm.lam)
    if algorithm.parts.scale == "whiten" and found.size:
        found = whiten(found)
    return found.astype(np.float32), ValueTargets(returns.astype(np.float32), before)


def update(session: Session, batch: Batch, targets: ValueTargets) -> CriticUpdate:
    """One optimizer step on the mean over tokens; a gradient that is not finite changes nothing."""
    algorithm, trainer = session.spec.algorithm, session.spec.trainer
    batch = replace(batch, routes=None)
    work = ValueBackward(batch, targets, ValueLoss(algorithm.value_clip), float(batch.targets.size))
    rate = algorithm.critic.lr or trainer.lr
    assert rate is not None  # chosen when the run was made
    stats: LossStats = session.pool.call("value_backward", work)
    step: Stepped = session.pool.call("optim_step", OptimStep(rate, trainer.max_grad_norm, "critic"))
    return CriticUpdate(stats, step)


def metrics(known: Known, targets: ValueTargets | None, updates: list[CriticUpdate]) -> dict[str, float]:
    """Of the values before the first update: explained_variance, the share of the variance of the returns
    that they have, and value, their mean where a sample begins, to be compared with the reward. Means over
    the updates: value_loss, value_clip_fraction, the share of tokens whose clip acted, critic_grad_norm.
    """
    found: dict[str, float] = {}
    if targets is not None and targets.values.size:
        lengths = known.lengths
        found["value"] = float(targets.values[np.cumsum(lengths) - lengths].mean())
        explained = explained_variance(targets.values, targets.returns)
        found |= {} if math.isnan(explained) else {"explained_variance": explained}
    if done := [update for update in updates if update.is_finite]:
        found["value_loss"] = sum(update.stats.loss for update in done) / len(done)
        tokens = sum(update.stats.tokens for update in done)
        found["value_clip_fraction"] = sum(update.stats.clipped for update in done) / tokens
        found["critic_grad_norm"] = sum(update.step.grad_norm for update in done) / len(done)
    return found
