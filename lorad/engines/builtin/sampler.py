"""Sample one token per row from logits. The randomness of a row depends on its own seed and token count
alone.

Left out: penalties, beam search, minimum lengths, grammars.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lorad.protocol.batch import Sampling

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function (Steele, Lea & Flood, 2014) on int64 tensors,
    whose products wrap around.
    """
    for shift, factor in _FACTORS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


_SUMS = {"cuda": torch.float64}
"""What probabilities are summed up in where a device adds in an order of its own: so that the order of 152 k
small numbers does not decide which token is drawn."""


def _running_sums(probabilities: torch.Tensor) -> torch.Tensor:
    """Sum [n, vocab] up along the vocabulary. Where torch is held to the same bits, in whole numbers of
    2 ** -52, whose order does not matter: it has no such kernel for others on a GPU.
    """
    if torch.are_deterministic_algorithms_enabled():
        return (probabilities.double() * 2.0**52).long().cumsum(-1).double() * 2.0**-52
    return probabilities.cumsum(-1, dtype=_SUMS.get(probabilities.device.type))


def uniforms(keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the `counts`-th draw of each key (both int64 [n]) as float64 [n] in [0, 1)."""
    return _shift_right(mix(keys + (counts + 1) * _GAMMA), 11).double() * 2.0**-53


class Steps(NamedTuple):
    """Which of the steps of `sample` any row needs: decided on the host, so that no device is asked."""

    scaled: bool
    truncated: bool
    greedy: bool

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> "Steps":
        every = list(samplings)
        return cls(
            scaled=any(s.temperature not in (0.0, 1.0) for s in every),
            truncated=any((s.top_p < 1 or s.top_k > 0) and s.temperature > 0 for s in every),
            greedy=any(s.temperature == 0 for s in every),
        )


def keys_of(seeds: np.ndarray) -> torch.Tensor:
    """Return the keys that `uniforms` draws from, int64 [n], for uint64 seeds [n]."""
    return mix(torch.from_numpy(seeds.astype(np.uint64).view(np.int64)))


def parameters_of(samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return temperature, top_p and top_k of each row as float32 [n, 3]."""
    rows = [(s.temperature, s.top_p, float(s.top_k)) for s in samplings]
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)


def sample(
    logits: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, parameters: torch.Tensor, steps: Steps
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the `counts`-th token (int64 [n]) of each row from logits [n, vocab].

    Returns the tokens, int64 [n], and their log-probabilities, float32 [n], under the temperature-scaled
    distribution before truncation, or under the unscaled one for greedy rows.
    """
    temperature, top_p, top_k = parameters.unbind(1)
    scores = logits.float()
    if steps.scaled:
        scores = scores / torch.where(temperature == 0, 1.0, temperature)[:, None]
    probabilities = torch.softmax(scores, -1)
    kept = _truncate(probabilities, top_p[:, None], top_k[:, None]) if steps.truncated else probabilities
    tokens = draw(kept, uniforms(keys, counts))
    if steps.greedy:
        tokens = torch.where(temperature == 0, logits.argmax(-1), tokens)
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()


def _truncate(probabilities: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero outside the top k, then outside the smallest set of them that holds top_p of their mass."""
    ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), 0.0)
    before = _running_sums(ordered) - ordered
    outside = (before >= top_p * ordered.sum(-1, keepdim=True)) & (rank > 0) & (top_p < 1)
    return torch.zeros_like(probabilities).scatter_(1, places, ordered.masked_fill(outside, 0.0))


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: int64 [n] from (unnormalised) probabilities [n, vocab] and uniforms [n] in [0,
    1).

    A token of probability 0 is never drawn: the target stays below the total, and the first larger sum is its
    end.
    """
    cdf = _running_sums(probabilities)
    total = cdf[:, -1:]
    target = torch.minimum(
        uniform[:, None].to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    # NaN finds no place
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)
