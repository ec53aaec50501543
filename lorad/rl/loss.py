"""The policy-gradient loss of GRPO, token by token. Flat tensors: T completion tokens, in the order of the
batch.

    loss_t = w_t * min(cap, mu_t) * max(-r_t A_t, -clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + w_t * kl_coef
    * KL_t

- r_t = exp(logprob - old) and the clipped surrogate: PPO (Schulman et al., 2017, arXiv 1707.06347), with one
    advantage
  A for all tokens of a sample: GRPO (Shao et al., 2024, arXiv 2402.03300). Two clip bounds: DAPO (arXiv
  2503.14476).
- mu_t = exp(old - sampler), truncated at `cap` and never differentiated: truncated importance sampling for
    the gap
  between trainer and engine (Ionides, 2008; Yao et al., 2025). It does not weigh the KL term.
- KL_t: one of Schulman's estimators ("Approximating KL divergence", 2020) of KL(policy || reference):
    `kl_estimate`.
- w_t: 1 for level "token"; 1 / length of its sample for level "sequence".

What is minimised is sum_t loss_t / normaliser. Left out: value functions, entropy bonus, sequence-level
ratios (GSPO).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lorad.protocol.batch import LossStats, PolicyLoss

_FAR = 3.0
"""Nats below the reference from which on k3 is linear: a token pulls as much as 1 - exp(3) = -19 at most."""


class TokenTargets(NamedTuple):
    """What a token's loss needs beside its log-probability; each [T] fp32.

    `old` None: the current policy, detached.
    """

    advantages: Tensor
    sampler: Tensor
    weights: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None

    def at(self, tokens: slice) -> TokenTargets:
        """Return the targets of some of the tokens."""
        old = None if self.old is None else self.old[tokens]
        reference = None if self.reference is None else self.reference[tokens]
        return TokenTargets(
            self.advantages[tokens], self.sampler[tokens], self.weights[tokens], old, reference
        )


class TokenLosses(NamedTuple):
    """Per token, each [T]; only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor
    sampler_difference: Tensor


def token_losses(logprobs: Tensor, targets: TokenTargets, loss: PolicyLoss) -> TokenLosses:
    """Return the loss of each token. logprobs: [T] fp32 with a gradient, at `loss.temperature` as all other
    log-probabilities.

    Raises ValueError when `loss.kl_coef` is not 0 and there are no reference log-probabilities.
    """
    current = logprobs.detach()
    old = current if targets.old is None else targets.old
    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    free, held = -ratio * targets.advantages, -bounded * targets.advantages
    surrogate = torch.maximum(free, held)
    if loss.importance_cap is not None:
        surrogate = surrogate * (old - targets.sampler).exp().clamp(max=loss.importance_cap)
    if targets.reference is None and loss.kl_coef:
        raise ValueError("a KL coefficient needs the reference's log-probabilities")
    kl = torch.zeros_like(current)
    if targets.reference is not None:
        kl = kl_estimate(logprobs, targets.reference, loss.kl_type)
    total = (surrogate + loss.kl_coef * kl) if loss.kl_coef else surrogate
    return TokenLosses(
        loss=targets.weights * total,
        ratio=ratio.detach(),
        clipped=(held > free).detach().float(),
        kl=kl.detach(),
        sampler_difference=(old - targets.sampler).abs(),
    )


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Schulman's estimate of KL(policy || reference) from a sample of the policy, token by token.

    With d = logprob - reference: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, >= 0), k3 =
    exp(-d) + d - 1 (unbiased, >= 0). Differentiated as it stands, as GRPO does: d(k1) = d(logprob), zero in
    the mean, so k1 is a statistic and no penalty; d(k2) = d * d(logprob), the gradient of the reverse KL;
    d(k3) = (1 - exp(-d)) * d(logprob), that of the forward KL (Tang & Munos, 2025, arXiv 2506.09477).

    k3 is exact for d >= -FAR. Below, where exp(-d) would let one token outweigh all others, it continues
    along its
    tangent: k3(-FAR) + (1 - exp(FAR)) * (d + FAR). Its slope there is the steepest one there is, and never
    zero: the pull back stays, which a clamp of the value, as in verl and SkyRL, takes away just where the
    policy is far off. So does Huber (1964) with a square; here it is the gradient's importance weight exp(-d)
    that is truncated at exp(FAR).
    """
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    near = difference.clamp(min=-_FAR)  # finite everywhere, also where it is not chosen
    exact = torch.exp(-near) + near - 1
    tangent = math.exp(_FAR) - _FAR - 1 + (1 - math.exp(_FAR)) * (difference + _FAR)
    return torch.where(difference < -_FAR, tangent, exact)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each token, entropy without gradient) of softmax(logits / temperature), in fp32.

    logits: [T, vocab], overwritten when they are fp32. tokens: int64 [T]. temperature: one, or fp32 [T]. At
    most two fp32 arrays of that shape live at a time, the logits among them; their gradient takes the place
    of one.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        scores, places = logits.float(), tokens[:, None]
        scale = temperature[:, None] if isinstance(temperature, Tensor) else temperature
        if isinstance(scale, Tensor) or scale != 1.0:
            scores.div_(scale)
        scores.sub_(scores.amax(-1, keepdim=True))
        chosen = scores.gather(-1, places)
        powers = scores.exp()
        total = powers.sum(-1, keepdim=True)
        normaliser = total.log()
        mean = torch.bmm(powers[:, None], scores[..., None])[:, 0] / total
        ctx.save_for_backward(powers, total, places)
        ctx.scale, ctx.dtype = scale, logits.dtype
        entropy = (normaliser - mean)[:, 0]
        ctx.mark_non_differentiable(entropy)
        return (chosen - normaliser)[:, 0], entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """(one-hot - softmax) * grad / temperature."""
        powers, total, places = ctx.saved_tensors
        grad = grad[:, None] / ctx.scale
        powers.mul_(grad / -total)
        powers.scatter_(-1, places, powers.gather(-1, places) + grad)
        return powers.to(ctx.dtype), None, None


def level_weights(lengths: Tensor, level: Literal["token", "sequence"]) -> Tensor:
    """Return the weight of each token, [sum of lengths] fp32; lengths: int64 [S], of whole samples."""
    weights = torch.ones_like(lengths, dtype=torch.float32) if level == "token" else 1 / lengths.float()
    return weights.repeat_interleave(lengths)


def loss_stats(losses: TokenLosses, entropy: Tensor, normaliser: float) -> LossStats:
    """Return the sums that a trainer reports; see `LossStats`."""
    difference = losses.sampler_difference
    sums = [losses.loss.detach() / normaliser, entropy, losses.kl, losses.clipped, losses.ratio, difference]
    values = torch.stack([*(s.sum() for s in sums), difference.max()]).tolist()
    names = ("loss", "entropy", "kl", "clipped", "ratio", "sampler_difference", "sampler_difference_max")
    return LossStats(tokens=difference.numel(), **dict(zip(names, values, strict=True)))
