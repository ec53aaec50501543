"""Verb two: score the samples with the reward, and say which of them take part in the step."""

from itertools import pairwise

import numpy as np

from lorad.driver.rewards import Score
from lorad.driver.session import Rollout, Sample, Session, StepSelection
from lorad.envs.programs import ProgramHosts
from lorad.errors import LoradError
from lorad.rl.advantage import best_of, shaped, zero_variance
from lorad.spec.model import Spec

_MANY_ROWS = 1.5  # of an episode


def score(session: Session, rollout: Rollout) -> list[Score]:
    """Wait for the scores of all samples, and warn of what they show."""
    with session.timed("score"):
        scores = rollout.scoring.scores()
    for note in (note for judged in session.judged for note in judged.rewarder.notes()):
        session.warn(note)
    hosts = session.hosts
    samples = rollout.samples
    if isinstance(hosts, ProgramHosts) and not hosts.has_warned:
        # what an agent program does behind a turn that was cut cannot stand in its row
        episodes = [sample.episode for sample in samples if sample.episode is not None]
        cut = sum(
            any(turn.finish == "length" and turn.row != after.row for turn, after in pairwise(episode.turns))
            for episode in episodes
        )
        rows = sum(1 + len(sample.forks) for sample in samples) / len(samples)
        if 2 * cut > len(samples) and rows >= _MANY_ROWS:
            hosts.has_warned = True
            session.warn(
                f"{cut} of {len(samples)} episodes of step {session.state.step + 1} went on behind a turn "
                f"that rollout.max_new_tokens ({session.spec.rollout.max_new_tokens}) had cut: each such "
                f"turn costs a new row with the whole history as its prompt, {rows:.1f} rows an episode; "
                "raise it, or have the program end there"
            )
    return scores


def too_many_failed(session: Session, scores: list[Score]) -> LoradError | None:
    """Return the error that ends a run with more failed rewards than reward.max_failures, else None."""
    failed = [s for s in scores if s.value is None]
    spec = session.spec
    run = session.params.run
    if len(failed) <= spec.max_failures * len(scores) or not spec.algorithm.reads_reward:
        return None
    judging = [judged.spec for judged in session.judged]
    names = " or ".join(
        dict.fromkeys(
            name for s in judging for name in ([s.env.name] if s.env.name else [r.name for r in s.rewards])
        )
    )
    return LoradError(
        f"the reward failed on {len(failed)} of {len(scores)} samples of step {session.state.step + 1}, and "
        f"reward.max_failures allows {spec.max_failures:.0%}: {failed[0].error}",
        hint=f"`lorad samples {run}` shows what it was given. Mend {names} or allow more failures, "
        f"then `lorad resume {run}` makes this step again.",
    )


def worth(spec: Spec, samples: list[Sample], scores: list[Score]) -> tuple[np.ndarray, np.ndarray]:
    """Return what each sample with a reward is worth, float32 [N], and which samples have one, bool [S]."""
    scored = np.array([s.value is not None for s in scores], np.bool_)
    rewards = np.array([s.value for s in scores if s.value is not None], np.float32)
    cut = np.array([s.finish == "length" for s in samples], np.bool_)
    lengths = np.array([s.size for s in samples], np.int64)
    return shaped(spec, rewards, lengths[scored], cut[scored]), scored


def choose(session: Session, rollout: Rollout, scores: list[Score]) -> StepSelection:
    """Say which samples take part.

    Samples without a reward take part in nothing: not in the mean and standard deviation of their group, nor
    in the loss. Groups whose rewards are all equal may be left out; with a baseline, groups with fewer than
    two rewards always are.
    """
    algorithm = session.spec.algorithm
    samples = rollout.samples
    earned, scored = worth(session.spec, samples, scores)
    ends = np.cumsum([len(group) for group in rollout.groups])
    sizes = np.array([part.sum() for part in np.split(scored, ends[:-1])], np.int32)
    flat = zero_variance(earned, sizes)
    alive = ~flat if algorithm.drops else sizes > (algorithm.has_baseline and algorithm.least is None)
    alive |= not algorithm.reads_reward
    masked = np.array([s.finish == "length" and algorithm.truncated == "mask" for s in samples], np.bool_)
    counted = (scored if algorithm.reads_reward else np.ones_like(scored)) & ~masked
    if algorithm.parts.surrogate == "nll":
        counted[scored] &= best_of(earned, sizes, algorithm.best, algorithm.least)
    return StepSelection(
        scores=scores,
        scored=scored,
        rewards=np.array([s.value for s in scores if s.value is not None], np.float32),
        worth=earned,
        sizes=sizes,
        counted=counted,
        trained=counted & np.repeat(alive, [len(group) for group in rollout.groups]),
        flat=flat,
    )
