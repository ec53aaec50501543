"""Policy-gradient losses, token by token. Flat tensors: T completion tokens, in the order of the batch.

    loss_t = w_t * (mu_t * l_t + kl_coef * KL_t - entropy_coef * H_t); sum_t loss_t / normaliser is minimised

- w_t: the caller's weights; see `lorad/rl/levels.py`.
- mu_t = min(cap, exp(old - sampler)), never differentiated: truncated importance sampling for the gap between
  trainer and engine (Ionides, 2008; Yao et al., 2025). It does not weigh the KL term.
- KL_t: one of Schulman's estimators ("Approximating KL divergence", 2020): `kl_estimate`.
- H_t: entropy of the distribution that the token was drawn from, at the temperature of the loss.
- l_t, the surrogate, with the advantage A and r = exp(logprob - anchor):

    clip        max(-r A, -clip(r, 1 - low, 1 + high) A): PPO (Schulman et al., 2017, arXiv 1707.06347),
                GRPO (Shao et al., 2024, arXiv 2402.03300); two bounds: DAPO (arXiv 2503.14476); where A < 0
                at most -dual A: dual-clip PPO (Ye et al., 2020, arXiv 1912.09729)
    weighted    -sg(clip(r, bounds)) A logprob: CISPO (MiniMax, 2025, arXiv 2506.13585); with bounds for
                A <= 0 alone TOPR (Le Roux et al., 2025, arXiv 2503.14286)
    soft        -4 / tau sigmoid(tau (r - 1)) A: SAPO (Gao et al., 2025, arXiv 2511.20347)
    divergence  -r A where the probability moved at most by the clip in the direction of A: DPPO-TV
    dro         -(A logprob - beta / 2 (logprob - anchor)^2): Richemond et al., 2024, arXiv 2405.19107
    rectified   -sg(exp(logprob)) logprob: DFT (Wu et al., 2025, arXiv 2508.05629)
    linear      -A logprob: the negative log-likelihood for A = 1, and any other loss for A = -dloss/dlogprob
    preference  the same with A = -dloss/dlogprob of a loss of pairs, see `lorad/rl/pairs.py`

- ratio `sequence`: r_t = sg(s) exp(logprob - sg(logprob)) with s = exp(mean over the trained tokens of the
  sample of logprob - anchor): GSPO (Zheng et al., 2025, arXiv 2507.18071). `geometric`: the mean of the log
  ratios that were clipped first: GMPO (Zhao et al., 2025, arXiv 2507.20673); the weights of a sample's tokens
  are to be equal then.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lorad.protocol.batch import LossStats, PolicyLoss, PolicyTargets
from lorad.rl.pairs import preference_loss
from lorad.spec.algorithm import KlType

_FAR = 3.0
"""Nats below the reference from which on k3 is linear: a token pulls as much as 1 - exp(3) = -19 at most."""
_PADDING = -1e30
"""The score of a column that is no word; at any temperature above 1e-8 it is a number, of probability 0."""


class TokenTargets(NamedTuple):
    """What a token's loss needs beside its log-probability; each [T] fp32.

    old: None where it is the current policy, detached.
    sequence: See `sequence_ratios`.
    """

    advantages: Tensor
    weights: Tensor
    sampler: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None
    sequence: Tensor | None = None

    def at(self, tokens: slice | Tensor) -> "TokenTargets":
        """Return the targets of some of the tokens."""
        return TokenTargets(*(None if values is None else values[tokens] for values in self))  # type: ignore[arg-type]

    def anchor(self, loss: PolicyLoss, current: Tensor) -> Tensor:
        """Return the log-probabilities that the ratio compares with. Raises ValueError without them."""
        if loss.anchor == "old":
            return current if self.old is None else self.old
        if self.sampler is None:
            raise ValueError("a ratio to the sampler needs its log-probabilities")
        return self.sampler


class TokenLosses(NamedTuple):
    """What the loss of each token is and does, each [T]; only `loss` carries a gradient.

    importance: exp(old - sampler), before it is capped.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor
    sampler_difference: Tensor
    importance: Tensor
    capped: Tensor


def token_targets(targets: PolicyTargets, tokens: slice | np.ndarray, device: torch.device) -> TokenTargets:
    """Move the targets of some tokens of a batch, a slice or int64 places, to the device, all at once."""
    arrays = {
        "advantages": targets.advantages,
        "weights": targets.weights,
        "sampler": targets.sampler_logprobs,
        "old": targets.old_logprobs,
        "reference": targets.reference_logprobs,
        "sequence": targets.sequence_log_ratios,
    }
    present = {name: array[tokens] for name, array in arrays.items() if array is not None}
    together = torch.from_numpy(np.stack([*present.values()], dtype=np.float32, casting="unsafe"))
    moved = dict(zip(present, together.to(device), strict=True))
    if "weights" not in moved:
        moved["weights"] = torch.ones_like(moved["advantages"])
    return TokenTargets(**moved)


def token_losses(
    logprobs: Tensor, targets: TokenTargets, loss: PolicyLoss, entropy: Tensor | None = None
) -> TokenLosses:
    """Return the loss of each token.

    Raises ValueError when `loss.kl_coef` is not 0 and there are no reference log-probabilities, and when the
    ratio is of samples and `sequence_ratios` was not called.

    logprobs: The log-probabilities, [T] fp32 with a gradient, at `loss.temperature` as all others.
    entropy: The entropies, [T] with a gradient, where `loss.entropy_coef` is not 0.
    """
    current = logprobs.detach()
    old = current if targets.old is None else targets.old
    sampler = old if targets.sampler is None else targets.sampler
    surrogate, ratio, clipped = _surrogate(logprobs, targets, loss)
    importance = (old - sampler).exp()
    cap = math.inf if loss.importance_cap is None else loss.importance_cap
    if loss.importance_cap is not None:
        surrogate = surrogate * importance.clamp(max=cap)
    if targets.reference is None and loss.kl_coef:
        raise ValueError("a KL coefficient needs the reference's log-probabilities")
    kl = torch.zeros_like(current)
    if targets.reference is not None:
        kl = kl_estimate(logprobs, targets.reference, loss.kl_type)
    penalty = kl * (logprobs - old).exp() if loss.kl_weighed else kl
    total = (surrogate + loss.kl_coef * penalty) if loss.kl_coef else surrogate
    if loss.entropy_coef:
        if entropy is None:
            raise ValueError("an entropy bonus needs the entropy")
        total = total - loss.entropy_coef * entropy
    return TokenLosses(
        loss=targets.weights * total,
        ratio=ratio.detach(),
        clipped=clipped.detach().float(),
        kl=kl.detach(),
        sampler_difference=(old - sampler).abs(),
        importance=importance,
        capped=(importance > cap).float(),
    )


def _surrogate(logprobs: Tensor, targets: TokenTargets, loss: PolicyLoss) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each token before weights, its ratio, and whether that was clipped."""
    a = targets.advantages
    current = logprobs.detach()
    anchor = targets.anchor(loss, current)
    log_ratio = logprobs - anchor
    if loss.ratio != "token":
        if targets.sequence is None:
            raise ValueError(f"a ratio of kind {loss.ratio} needs `sequence_ratios`")
        own = _within_bounds(log_ratio, a, loss) if loss.ratio == "geometric" else log_ratio
        log_ratio = targets.sequence + own - own.detach()
    ratio = log_ratio.exp()
    never = torch.zeros_like(current, dtype=torch.bool)
    match loss.surrogate:
        case "linear" | "preference":
            return -a * logprobs, ratio, never
        case "rectified":
            return -current.exp() * logprobs, ratio, never
        case "dro":
            return -(a * logprobs - loss.beta / 2 * (logprobs - anchor).square()), ratio, never
        case "soft":
            tau = torch.where(a > 0, loss.taus[0], loss.taus[1])
            return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a, ratio, never
        case "divergence":
            moved = current.exp() - anchor.exp()
            far = torch.where(a > 0, moved > loss.clip_high, moved < -loss.clip_low)
            return -ratio * a * ~far, ratio, far
        case "weighted":
            bounded, far = _bounded(ratio.detach(), a, loss)
            return -bounded * a * logprobs, ratio, far
    if loss.ratio == "geometric":
        return -ratio * a, ratio, (own != logprobs - anchor)
    free = -ratio * a
    bound = -ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * a
    clipped = torch.maximum(free, bound)
    if loss.dual is None:
        return clipped, ratio, bound > free
    most = -loss.dual * a
    return (
        torch.where(a < 0, torch.minimum(clipped, most), clipped),
        ratio,
        (bound > free) | (clipped > most) & (a < 0),
    )


def _bounded(ratio: Tensor, advantages: Tensor, loss: PolicyLoss) -> tuple[Tensor, Tensor]:
    """Return the importance weight of each token, and whether its bounds changed it."""
    low, high = loss.bounds
    outside = (ratio <= low) | (ratio >= high)
    bounded = ratio.masked_fill(outside, 0.0) if loss.drops else ratio.clamp(low, high)
    if loss.negative_bounds is not None:
        bounded = torch.where(advantages > 0, 1.0, ratio.clamp(*loss.negative_bounds))
    return bounded, bounded != ratio


def _within_bounds(log_ratio: Tensor, advantages: Tensor, loss: PolicyLoss) -> Tensor:
    """Clip each token's log ratio where that makes the loss larger, as PPO clips the ratio."""
    sign = advantages.sign()
    return sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-loss.clip_low, loss.clip_high))


@torch.no_grad()
def sequence_ratios(
    logprobs: Tensor, targets: TokenTargets, loss: PolicyLoss, lengths: Tensor
) -> TokenTargets:
    """Add the mean log ratio of its sample to each token, where the loss asks for it. Raises ValueError.

    Tokens of weight 0 leave the mean. The log-probabilities [T] are of whole samples; lengths is int64 [S].
    """
    if loss.ratio == "token" or targets.sequence is not None:
        return targets
    log_ratio = logprobs - targets.anchor(loss, logprobs)
    if loss.ratio == "geometric":
        log_ratio = _within_bounds(log_ratio, targets.advantages, loss)
    trained = (targets.weights > 0).to(log_ratio.dtype)
    owner = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    nothing = torch.zeros(lengths.numel(), dtype=log_ratio.dtype, device=log_ratio.device)
    sums = nothing.index_add(0, owner, log_ratio * trained)
    counts = nothing.index_add(0, owner, trained).clamp(min=1)
    return targets._replace(sequence=(sums / counts)[owner])


def preference_targets(
    logprobs: Tensor, targets: TokenTargets, loss: PolicyLoss, lengths: np.ndarray
) -> tuple[TokenTargets, float]:
    """Give tokens the advantages with which they have the gradient of a loss of preferences.

    The log-probabilities [T] are of whole pairs, or samples where the loss is kto, whose lengths, int [S],
    sum to T. Returns the targets, and the sum of the losses of all pairs or samples. Raises ValueError when
    the loss has no `preference`, or there are no reference log-probabilities.
    """
    preference = loss.preference
    reference = targets.reference
    if preference is None or reference is None:
        raise ValueError("a loss of preferences needs `preference` and the reference's log-probabilities")
    columns = torch.stack([logprobs, reference, targets.weights, targets.advantages])
    current, behind, trained, each = columns.detach().cpu().numpy()  # read once
    desired = each[np.cumsum(lengths) - 1] > 0
    outcome = preference_loss(current, behind, lengths, preference, trained, desired, loss.divergence)
    count = lengths.size // 2 if loss.has_pairs else lengths.size
    slopes = torch.from_numpy((-count * outcome.gradient).astype(np.float32)).to(logprobs.device)
    return targets._replace(advantages=slopes, reference=None), count * outcome.loss


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KlType) -> Tensor:
    """Return Schulman's estimate of KL(policy || reference) from a sample of the policy, token by token.

    With d = logprob - reference: k1 = d (unbiased, may be negative), abs = |d|, k2 = d^2 / 2 (biased, >= 0),
    k3 = exp(-d) + d - 1 (unbiased, >= 0), k3+ = the value of k3 with the gradient of k2. Differentiated as it
    stands, as GRPO does: d(k1) = d(logprob), zero in the mean, so k1 is a statistic and no penalty; d(k2) =
    d * d(logprob), the gradient of the reverse KL; d(k3) = (1 - exp(-d)) * d(logprob), that of the forward KL
    (Tang & Munos, 2025, arXiv 2506.09477).

    k3 is exact for d >= -FAR. Below, where exp(-d) would let one token outweigh all others, it continues
    along its tangent: k3(-FAR) + (1 - exp(FAR)) * (d + FAR). Its slope there is the steepest that there is,
    and never zero: the pull back stays, which a clamp of the value, as in verl and SkyRL, takes away just
    where the policy is far off. So does Huber (1964) with a square; here it is the gradient's importance
    weight exp(-d) that is truncated at exp(FAR).
    """
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    square = difference.square() / 2
    if kind == "k2":
        return square
    # finite everywhere, also where it is not chosen; the clamp of torch 2.14 has no gradient at its bound
    near = difference.masked_fill(difference < -_FAR, -_FAR)
    exact = torch.exp(-near) + near - 1
    tangent = math.exp(_FAR) - _FAR - 1 + (1 - math.exp(_FAR)) * (difference + _FAR)
    k3 = torch.where(difference < -_FAR, tangent, exact)
    return square + (k3 - square).detach() if kind == "k3+" else k3


class TokenLogprobs(NamedTuple):
    """What a softmax says of each token, each [T]; one is `correct` where no other is more likely."""

    logprobs: Tensor
    entropy: Tensor
    correct: Tensor


class VocabularyPart(NamedTuple):
    """The columns of the logits that this rank has, where a vocabulary is cut over ranks.

    first: The word of the first column.
    words: How many columns are words; the ones behind them are padding.
    group: The ranks that have the other columns of the same rows.
    """

    first: int
    words: int
    group: dist.ProcessGroup


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    temperature: float | Tensor,
    *,
    entropy_gradient: bool = False,
    part: VocabularyPart | None = None,
) -> TokenLogprobs:
    """Return what softmax(logits / temperature) says of each token, in fp32.

    At most two fp32 arrays of the shape of the logits live at a time, these among them; their gradient takes
    the place of one. The entropy has a gradient with `entropy_gradient`, whose backward takes a third array.

    logits: The scores, [T, vocab], which are overwritten when they are fp32.
    tokens: The tokens, int64 [T].
    temperature: One temperature, or one for each token, fp32 [T].
    part: The words of the logits where these are of some alone, [T, columns]. Maximum and sums of each
        row are taken over the ranks, and every rank gets the same result and the gradient of its own
        columns. Collective.
    """
    return TokenLogprobs(
        *_TokenLogprobs.apply(logits, tokens, temperature, entropy_gradient, part)  # type: ignore[no-untyped-call]
    )


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float | Tensor,
        entropy_gradient: bool,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = logits.float()
        places = tokens[:, None]
        elsewhere = None
        if part is not None:
            scores[:, part.words :] = _PADDING
            places = places - part.first
            elsewhere = (places < 0) | (places >= part.words)
            places = places.masked_fill(elsewhere, 0)
        scale = temperature[:, None] if isinstance(temperature, Tensor) else temperature
        if isinstance(scale, Tensor) or scale != 1.0:
            scores.div_(scale)
        scores.sub_(_over_parts(scores.amax(-1, keepdim=True), part, dist.ReduceOp.MAX))
        chosen = scores.gather(-1, places)
        powers = scores.exp()
        total = powers.sum(-1, keepdim=True)
        weighted = torch.bmm(powers[:, None], scores[..., None])[:, 0]
        if elsewhere is not None:
            sums = torch.cat([chosen.masked_fill(elsewhere, 0), total, weighted], -1)
            chosen, total, weighted = _over_parts(sums, part, dist.ReduceOp.SUM).split(1, -1)
        normaliser = total.log()
        entropy = normaliser - weighted / total
        ctx.save_for_backward(powers, total, places, entropy, elsewhere)
        ctx.scale = scale
        ctx.dtype = logits.dtype
        ctx.entropy_gradient = entropy_gradient
        correct = chosen[:, 0] == 0  # the greatest was taken off
        ctx.mark_non_differentiable(correct, *([] if entropy_gradient else [entropy]))
        return (chosen - normaliser)[:, 0], entropy[:, 0], correct

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        """Compute (one-hot - softmax) * grad / t, and d(entropy) = -p * (log p + entropy) / t."""
        powers, total, places, entropy, elsewhere = ctx.saved_tensors
        grad = grad[:, None] / ctx.scale
        bonus = None
        if ctx.entropy_gradient:
            p = powers / total
            bonus = torch.special.xlogy(p, p).add_(p * entropy).mul_(-grad_entropy[:, None] / ctx.scale)
        powers.mul_(grad / -total)
        at_target = grad if elsewhere is None else grad.masked_fill(elsewhere, 0)
        powers.scatter_(-1, places, powers.gather(-1, places) + at_target)
        if bonus is not None:
            powers.add_(bonus)
        return powers.to(ctx.dtype), None, None, None, None


def _over_parts(mine: Tensor, part: VocabularyPart | None, how: dist.ReduceOp.RedOpType) -> Tensor:
    """Combine what each rank found in its columns, in place."""
    if part is not None:
        dist.all_reduce(mine, how, group=part.group)
    return mine


def loss_stats(losses: TokenLosses, entropy: Tensor, correct: Tensor, normaliser: float) -> LossStats:
    """Return the sums that a trainer reports; see `LossStats`."""
    difference = losses.sampler_difference
    sums = {
        "loss": losses.loss.detach() / normaliser,
        "entropy": entropy.detach(),
        "correct": correct.float(),
        "kl": losses.kl,
        "clipped": losses.clipped,
        "ratio": losses.ratio,
        "capped": losses.capped,
        "sampler_difference": difference,
    }
    values = [*(s.sum() for s in sums.values()), difference.max(), losses.importance.max()]
    names = (*sums, "sampler_difference_max", "importance_max")
    return LossStats(tokens=difference.numel(), **dict(zip(names, torch.stack(values).tolist(), strict=True)))
