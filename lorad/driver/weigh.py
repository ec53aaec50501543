"""Verb three: turn rewards into advantages."""

from __future__ import annotations

import numpy as np

from lorad.driver.rewards import Score
from lorad.driver.session import Rollout, Session, Weighed
from lorad.rl.advantage import group_advantages, zero_variance


def weigh(session: Session, rollout: Rollout, scores: list[Score]) -> Weighed:
    """Group-relative advantages; groups whose rewards are all equal carry no gradient and may be dropped."""
    algorithm = session.spec.algorithm
    with session.timed("weigh"):
        rewards = np.array([s.reward for s in scores], np.float32)
        sizes = np.array([len(group) for group in rollout.groups], np.int32)
        flat = zero_variance(rewards, sizes)
        drop = algorithm.drop_zero_variance and not algorithm.kl.coef  # the KL term acts on every sample
        return Weighed(
            scores=scores,
            rewards=rewards,
            advantages=group_advantages(rewards, sizes, algorithm.advantage),
            alive=~flat if drop else np.ones_like(flat),
            flat=flat,
        )
