"""Verb two: score the samples with the reward."""

from __future__ import annotations

from lorad.driver.rewards import Score
from lorad.driver.session import Rollout, Session
from lorad.errors import LoradError


def score(session: Session, rollout: Rollout) -> list[Score]:
    """One score for each sample, made now unless it was made ahead."""
    made = rollout.scores
    with session.timed("score"):
        return session.rewarder.score([s.for_reward() for s in rollout.samples]) if made is None else made


def too_many_failed(session: Session, scores: list[Score]) -> LoradError | None:
    """Return the error that ends a run whose share of failed rewards exceeds reward.max_failures; None: it
    does not.
    """
    failed = [s for s in scores if s.value is None]
    reward, run = session.spec.reward_spec, session.params.run
    if len(failed) <= reward.max_failures * len(scores):
        return None
    return LoradError(
        f"the reward failed on {len(failed)} of {len(scores)} samples of step {session.state.step + 1}, and "
        f"reward.max_failures allows {reward.max_failures:.0%}: {failed[0].error}",
        hint=f"`lorad samples {run}` shows what it was given. Mend {reward.name} or allow more failures, "
        f"then `lorad resume {run}` makes this step again.",
    )
