"""Losses of preferences, and their derivatives by the log-probability of each token, in closed form.

S = sum, M = mean over the trained tokens of a completion of logprob - reference; c is chosen, r rejected;
s(x) = 1 / (1 + exp(-x)). Minimised is the mean over pairs of

    sigmoid       -(1 - e) log s(beta h) - e log s(-beta h), h = S_c - S_r: DPO (Rafailov et al., 2023, arXiv
                  2305.18290), with label smoothing e cDPO
    sigmoid_norm  the same with h = M_c - M_r
    ipo           (h - 1 / (2 beta))^2, h = M_c - M_r: IPO (Azar et al., 2023, arXiv 2310.12036), of means as
                  its authors have it
    hinge         max(0, 1 - beta (S_c - S_r)): SLiC (Zhao et al., 2023, arXiv 2305.10425)
    apo_zero      1 - s(beta S_c) + s(beta S_r): APO (D'Oosterlinck et al., 2024, arXiv 2408.06266)
    simpo         -log s(beta h - gamma), h of mean log-probabilities without a reference: SimPO (Meng et al.,
                  2024, arXiv 2405.14734)

and over completions of kto: 1 - s(beta (S - z)) for what is desired, 1 - s(beta (z - S)) for the others, with
z the KL to the reference, of which nothing is differentiated (Ethayarajh et al., 2024, arXiv 2402.01306). To
each loss of pairs nll * -(mean log-probability of the chosen) is added (RPO: Pang et al., 2024, arXiv
2404.19733).
"""

from dataclasses import dataclass

import numpy as np

from lorad.spec.algorithm import Preference

_OF_MEANS = ("ipo", "sigmoid_norm", "simpo")
_Slopes = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Loss of each pair, and its derivatives by the scores of chosen and rejected."""


@dataclass(frozen=True)
class PreferenceOutcome:
    """The loss of preferences on some completions.

    loss: The mean over pairs or completions.
    gradient: The derivative of the loss by each log-probability, float64 [T].
    shifts: The sum of logprob - reference of each completion, float64 [S].
    rewards: beta times what the loss compares, as rewards/chosen and rewards/rejected of TRL, float64
        [S].
    """

    loss: float
    gradient: np.ndarray
    shifts: np.ndarray
    rewards: np.ndarray


def preference_loss(
    logprobs: np.ndarray,
    reference: np.ndarray,
    lengths: np.ndarray,
    preference: Preference,
    trained: np.ndarray | None = None,
    desired: np.ndarray | None = None,
    divergence: float = 0.0,
) -> PreferenceOutcome:
    """Return `label_loss` for kto, which needs `desired`, and `pair_loss` for all others."""
    if preference.loss != "kto":
        return pair_loss(logprobs, reference, lengths, preference, trained)
    if desired is None:
        raise ValueError("kto needs to know which completions are desired")
    return label_loss(logprobs, reference, lengths, desired, preference, divergence, trained)


def pair_loss(
    logprobs: np.ndarray,
    reference: np.ndarray,
    lengths: np.ndarray,
    preference: Preference,
    trained: np.ndarray | None = None,
) -> PreferenceOutcome:
    """Return the loss of pairs, whose chosen and rejected completions alternate; lengths is int [S]."""
    kind = preference.loss
    mask, owner, counts = _owned(lengths, trained)
    moved = _sums(logprobs - reference, mask, owner)
    scores = _sums(logprobs, mask, owner) if kind == "simpo" else moved
    scores = scores / counts if kind in _OF_MEANS else scores
    losses, by_chosen, by_rejected = _slopes(preference, scores[0::2], scores[1::2])
    slopes = np.empty(lengths.size)
    slopes[0::2] = by_chosen
    slopes[1::2] = by_rejected
    slopes = slopes / counts if kind in _OF_MEANS else slopes
    if preference.nll:
        means = _sums(logprobs, mask, owner)[0::2] / counts[0::2]
        losses = losses - preference.nll * means
        slopes[0::2] -= preference.nll / counts[0::2]
    rewards = preference.strength * scores
    return PreferenceOutcome(float(losses.mean()), mask * slopes[owner] / losses.size, moved, rewards)


def label_loss(
    logprobs: np.ndarray,
    reference: np.ndarray,
    lengths: np.ndarray,
    desired: np.ndarray,
    preference: Preference,
    divergence: float,
    trained: np.ndarray | None = None,
) -> PreferenceOutcome:
    """Return the loss of KTO on completions that are desired or not, bool [S], with z as the divergence."""
    mask, owner, _ = _owned(lengths, trained)
    moved = _sums(logprobs - reference, mask, owner)
    beta = preference.strength
    sign = np.where(desired, 1.0, -1.0)
    reached = _s(beta * sign * (moved - divergence))
    slopes = -beta * sign * reached * (1 - reached)
    return PreferenceOutcome(
        float((1 - reached).mean()), mask * slopes[owner] / lengths.size, moved, beta * moved
    )


def mismatched_divergence(
    logprobs: np.ndarray, reference: np.ndarray, lengths: np.ndarray, trained: np.ndarray | None = None
) -> float:
    """Return z of KTO: the mean over completions of other prompts, at least 0."""
    mask, owner, _ = _owned(lengths, trained)
    return max(0.0, float(_sums(logprobs - reference, mask, owner).mean()))


def _slopes(preference: Preference, chosen: np.ndarray, rejected: np.ndarray) -> _Slopes:
    beta = preference.strength
    e = preference.smoothing
    h = chosen - rejected
    if preference.loss == "apo_zero":
        up = _s(beta * chosen)
        down = _s(beta * rejected)
        return 1 - up + down, -beta * up * (1 - up), beta * down * (1 - down)
    if preference.loss == "ipo":
        off = h - 1 / (2 * beta)
        return off**2, 2 * off, -2 * off
    u = beta * h - preference.margin
    if preference.loss == "hinge":
        slope = np.where(u < 1, -beta, 0.0)
        return np.maximum(0.0, 1 - u), slope, -slope
    slope = beta * (e * _s(u) - (1 - e) * _s(-u))
    return (1 - e) * np.logaddexp(0, -u) + e * np.logaddexp(0, u), slope, -slope


def _owned(lengths: np.ndarray, trained: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a mask, float64 [T], the completion of each token, and the trained tokens of each completion."""
    owner = np.repeat(np.arange(lengths.size), lengths)
    mask = np.ones(owner.size) if trained is None else trained.astype(np.float64)
    return mask, owner, np.maximum(np.bincount(owner, mask, minlength=lengths.size), 1)


def _sums(values: np.ndarray, mask: np.ndarray, owner: np.ndarray) -> np.ndarray:
    return np.bincount(owner, values.astype(np.float64) * mask, minlength=int(owner[-1]) + 1)


def _s(x: np.ndarray) -> np.ndarray:
    """Compute 1 / (1 + exp(-x)) without overflow."""
    result: np.ndarray = np.exp(-np.logaddexp(0, -x))
    return result
