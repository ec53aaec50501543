"""Verb two: score the samples with the reward."""

from __future__ import annotations

from lorad.driver.rewards import Score
from lorad.driver.session import Rollout, Session
from lorad.errors import LoradError


def score(session: Session, rollout: Rollout) -> list[Score]:
    """One score for each sample, made now unless it was made ahead.

    Raises LoradError when so many failed that the step is worth nothing.
    """
    made = rollout.scores
    with session.timed("score"):
        scores = session.rewarder.score([s.for_reward() for s in rollout.samples]) if made is None else made
    failed = [s for s in scores if s.value is None]
    limit = session.spec.reward_spec.max_failures
    if failed and len(failed) >= limit * len(scores):
        raise LoradError(
            f"the reward failed on {len(failed)} of {len(scores)} samples of step {session.state.step + 1}: "
            f"{failed[0].error}",
            hint=f"Mend {session.spec.reward_spec.name}, then `lorad resume {session.params.run}`.",
        )
    return scores
