"""Verb three: turn rewards into what the trainer weighs each token with."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from msgspec import structs

from lorad.driver import critic
from lorad.driver.sampling.rows import batch_of, offsets_of
from lorad.driver.session import Rollout, Session, StepSelection, TrainBatch, Weighed
from lorad.protocol.batch import Batch, PolicyTargets
from lorad.protocol.calls import Logprobs, LogprobsOf, LogprobsResult
from lorad.rl.advantage import advantages, returns_to_go, whiten
from lorad.rl.correction import correction
from lorad.rl.levels import level_weights
from lorad.rl.user.functions import AdvantageInput
from lorad.spec.model import Spec

_ASYNC_CAP = 2.0  # of importance weights where nothing is said; see `importance_cap`
_MOVING = 0.9  # weight of the steps before in the baseline `moving`


def importance_cap(spec: Spec) -> float | None:
    """Return algorithm.importance_cap; without one, _ASYNC_CAP where samples may be of older versions than
    the trained one, or of a program that computes otherwise.

    The loss then is decoupled PPO: its clip is around the policy before the update, and exp(that - sampler),
    truncated, weighs what an older version sampled (Hilton et al., 2022, arXiv 2110.00641; AReaL, Fu et al.,
    2025, arXiv 2505.24298; truncation: Yao et al., 2025, "Your efficient RL framework secretly brings you
    off-policy training").
    """
    algorithm = spec.algorithm
    if algorithm.loss:
        return None
    if algorithm.importance_cap is not None or algorithm.correction is not None:
        return algorithm.importance_cap
    is_apart = {spec.trainer.backend, spec.rollout.backend} != {"builtin"}
    is_off = algorithm.parts.anchor == "sampler"  # whose ratio weighs it already
    is_off = is_off or algorithm.parts.surrogate == "nll"
    return _ASYNC_CAP if not is_off and (is_apart or spec.rollout.max_staleness) else None


def needs_old(spec: Spec) -> bool:
    """Return whether the policy before the update differs from that of the update's own forward pass.

    It does when there are several updates, or when importance weights would have the noise of dropout. A
    correction and a penalty in the reward need it beforehand; distill takes the sampler's instead. A loss of
    the user's is given it.
    """
    algorithm = spec.algorithm
    if algorithm.loss or algorithm.correction is not None:
        return True
    if algorithm.kl_coef and algorithm.kl_place == "reward" and algorithm.name != "distill":
        return True
    is_weighed = importance_cap(spec) is not None
    return algorithm.epochs > 1 or algorithm.minibatches > 1 or (is_weighed and spec.lora.dropout > 0)


def gather(session: Session, rollout: Rollout, scored: StepSelection) -> TrainBatch:
    """Gather the samples that are trained on and their log-probabilities, before the first update."""
    sizes = [len(group) for group in rollout.groups]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.flatnonzero(scored.trained)
    groups = np.flatnonzero(np.bincount(owner[rows]))  # np.unique would import numpy.ma
    samples = rollout.samples
    members = [[samples[row] for row in rows[owner[rows] == group]] for group in groups]
    training = TrainBatch(
        batch=batch_of(members),
        rows=rows,
        groups=groups,
        sampler=np.concatenate([np.zeros(0, np.float32), *(samples[row].logprobs for row in rows)]),
        lengths=np.array([samples[row].size for row in rows], np.int32),
        sizes=np.array([len(some) for some in members], np.int32),
        offsets=offsets_of(members),
    )
    if not rows.size:
        return training

    algorithm = session.spec.algorithm
    has_own = session.params.reference or session.state.reference_sha256
    own: LogprobsOf = "reference" if has_own else "base"
    ranges = minibatch_ranges(session.spec, rollout)
    parts = [training.part(within(groups, *each)) for each in ranges]

    def each(ask: Callable[[Batch], np.ndarray]) -> np.ndarray:
        """Ask for each mini-batch by itself: groups of others change no bit of it."""
        return np.concatenate([ask(part) for part in parts if part.targets.size])

    with session.timed("train"):
        old = each(lambda part: logprobs(session, "slot", part)) if needs_old(session.spec) else None
        reference = None
        if algorithm.has_reference and algorithm.teacher is not None:  # another model, with its own routes
            reference = each(lambda part: logprobs(session, "teacher", structs.replace(part, routes=None)))
        elif algorithm.has_reference:
            reference = each(lambda part: logprobs(session, own, part))
        values = each(lambda part: critic.values(session, part)) if algorithm.has_critic else None
    return replace(training, old=old, reference=reference, values=values)


def minibatch_ranges(spec: Spec, rollout: Rollout) -> list[tuple[int, int]]:
    """Cut the groups of a rollout into contiguous runs, one for each optimizer step of an epoch."""
    count = min(spec.algorithm.minibatches, len(rollout.groups))
    return [(part[0], part[-1] + 1) for part in np.array_split(np.arange(len(rollout.groups)), count)]


def within(groups: np.ndarray, first: int, end: int) -> slice:
    """Return which of the groups, in ascending order, are at least `first` and below `end`."""
    return slice(*np.searchsorted(groups, [first, end]).tolist())


def weigh(session: Session, rollout: Rollout, scored: StepSelection, training: TrainBatch) -> Weighed:
    """Compute the advantage, the weight and the correction of each token."""
    algorithm = session.spec.algorithm
    lengths = training.lengths
    with session.timed("weigh"):
        penalty: np.ndarray | None = None  # the coefficient times k1 [T], where it is in the reward
        kl: float | None = None
        student = training.sampler if algorithm.name == "distill" else training.old
        reference = None if algorithm.kl_place == "loss" else training.reference
        if reference is not None and student is not None and student.size:
            k1 = student.astype(np.float64) - reference
            penalty = session.kl_coef * k1
            kl = float(k1.mean())
        values = None
        if algorithm.has_critic:
            worth = scored.worth.astype(np.float64)[(np.cumsum(scored.scored) - 1)[training.rows]]
            by_token, values = critic.estimate(session, training, worth, penalty)
        else:
            by_token = _token_advantages(session, rollout, scored, training, penalty)
        mean = np.full(len(scored.scores), np.nan, np.float32)
        mean[scored.scored] = 0
        mean[training.rows] = _sums(by_token, lengths) / lengths
        importance = None
        if (settings := algorithm.correction) is not None and training.old is not None:
            importance = correction(
                training.old, training.sampler, lengths, settings.kind, settings.low, settings.high
            )
            by_token = (by_token * importance).astype(np.float32)
        targets = PolicyTargets(
            advantages=by_token,
            sampler_logprobs=training.sampler,
            old_logprobs=training.old,
            reference_logprobs=training.reference if algorithm.kl_place == "loss" or algorithm.loss else None,
            weights=level_weights(lengths, algorithm.parts.level, training.sizes),
        )
    return Weighed(training, targets, mean, importance, kl, values)


def _token_advantages(
    session: Session,
    rollout: Rollout,
    scored: StepSelection,
    training: TrainBatch,
    penalty: np.ndarray | None,
) -> np.ndarray:
    """Return the advantages, float32 [T]. The penalty, [T], is subtracted from the reward of each token.

    With a baseline the penalty of the whole sample is taken from its reward; without one each token bears its
    own and the ones after it (REINFORCE++, Hu et al., 2025, arXiv 2501.03262). In distill it bears its own
    alone (Agarwal et al., 2024, arXiv 2306.13649; Thinking Machines, 2025, "On-policy distillation").
    """
    algorithm = session.spec.algorithm
    parts = algorithm.parts
    lengths = training.lengths
    if parts.surrogate == "nll":
        return np.ones(int(lengths.sum()), np.float32)
    if not algorithm.reads_reward and penalty is not None:
        return (-penalty).astype(np.float32)
    worth = scored.worth.astype(np.float64)
    places = (np.cumsum(scored.scored) - 1)[training.rows]  # places among the scored
    if penalty is not None and not algorithm.has_baseline and not algorithm.advantage:
        worth = worth - _baseline(session, worth)
        result = returns_to_go(worth[places], penalty, lengths)
        return (whiten(result) if parts.scale == "whiten" else result).astype(np.float32)
    if penalty is not None and algorithm.name != "distill":
        worth[places] -= _sums(penalty, lengths)
    if algorithm.advantage:
        return _own_advantages(session, rollout, scored, training, worth)
    if parts.baseline == "moving":
        worth = worth - _baseline(session, worth)
    sizes = np.array([s.size for s in rollout.samples])[scored.scored]
    baseline = "zero" if parts.baseline == "moving" else parts.baseline
    each = advantages(worth, scored.sizes, baseline, parts.scale, sizes)
    result = np.repeat(each[places], lengths)
    if algorithm.name == "distill" and penalty is not None:
        result = ((algorithm.reward_coef or 0.0) * result - penalty).astype(np.float32)
    return result


def _own_advantages(
    session: Session, rollout: Rollout, scored: StepSelection, training: TrainBatch, worth: np.ndarray
) -> np.ndarray:
    """Return the advantages of the user's function, float32 [T], from all samples with a reward."""
    if not training.rows.size:
        return np.zeros(0, np.float32)
    samples = [s for s, has_reward in zip(rollout.samples, scored.scored, strict=True) if has_reward]
    lengths = np.array([s.size for s in samples], np.int64)
    rows = np.flatnonzero(scored.scored)
    is_known = np.repeat(np.isin(rows, training.rows), lengths)
    assert session.own.advantage is not None
    array = session.own.advantage.advantages(
        AdvantageInput(
            rewards=worth,
            group_sizes=scored.sizes[scored.sizes > 0],
            lengths=lengths,
            step=session.state.step + 1,
            truncated=np.array([s.finish == "length" for s in samples], np.bool_),
            sampler=np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in samples)]),
            old=_spread(training.old, is_known),
            ref=_spread(training.reference, is_known),
        )
    )
    each = array if array.size == is_known.size else np.repeat(array, lengths)
    return each[is_known].astype(np.float32)


def _spread(values: np.ndarray | None, where: np.ndarray) -> np.ndarray | None:
    """Put values to where they belong, NaN elsewhere."""
    if values is None:
        return None
    spread = np.full(where.size, np.nan, np.float32)
    spread[where] = values
    return spread


def _baseline(session: Session, worth: np.ndarray) -> float:
    """Return the mean of the steps before, and count this step into it; 0 but for the baseline `moving`."""
    state = session.state
    if session.spec.algorithm.parts.baseline != "moving" or not worth.size:
        return 0.0
    before = float(worth.mean()) if state.baseline is None else state.baseline
    state.baseline = _MOVING * before + (1 - _MOVING) * float(worth.mean())
    return before


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum the values of the tokens of each sample."""
    owner = np.repeat(np.arange(lengths.size), lengths)
    return np.bincount(owner, values, minlength=lengths.size)


def logprobs(session: Session, of: LogprobsOf, batch: Batch) -> np.ndarray:
    """Return log-probabilities, float32 [M], at the temperature of the sampling."""
    return predictions(session, of, batch).logprobs


def predictions(session: Session, of: LogprobsOf, batch: Batch) -> LogprobsResult:
    """Ask for log-probabilities and what is correct, at the temperature of the sampling."""
    args = Logprobs(of, batch, session.spec.rollout.temperature)
    result: LogprobsResult = session.pool.call("logprobs", args)
    return result
