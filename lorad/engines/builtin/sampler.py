"""From logits to one token per row. Each row is random by its own seed and token count alone.

Left out: penalties, beam search, minimum lengths, grammars.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lorad.protocol.batch import Sampling

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
FACTORS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def mix(x: Tensor) -> Tensor:
    """SplitMix64's output function (Steele, Lea & Flood, 2014) on int64 tensors, whose products wrap around."""
    for shift, factor in FACTORS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(keys: Tensor, counts: Tensor) -> Tensor:
    """float64 [n] in [0, 1): the `counts`-th draw of each key (both int64 [n])."""
    return _shift_right(mix(keys + (counts + 1) * GAMMA), 11).double() * 2.0**-53


class Choice:
    """How each row of a decode batch samples: seeds and parameters, one entry per row."""

    def __init__(self, seeds: np.ndarray, samplings: Sequence[Sampling], device: torch.device) -> None:
        self.keys = mix(torch.from_numpy(seeds.astype(np.uint64).view(np.int64)).to(device))
        self.counts = torch.zeros_like(self.keys)
        rows = [(s.temperature, s.top_p, float(s.top_k)) for s in samplings]
        self.parameters = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)
        self._derive(device)

    def _derive(self, device: torch.device) -> None:
        """Which of the steps below any row needs; on the host, so that no device is asked."""
        temperature, top_p, top_k = self.parameters.unbind(1)
        greedy = temperature == 0
        scale = torch.where(greedy, 1.0, temperature)
        truncated = ((top_p < 1) | (top_k > 0)) & ~greedy
        self.greedy = greedy.to(device) if bool(greedy.any()) else None
        self.scale = scale[:, None].to(device) if bool((scale != 1).any()) else None
        self.truncated = truncated.nonzero()[:, 0].to(device) if bool(truncated.any()) else None

    def select(self, rows: Tensor) -> None:
        """Keep these rows (int64 [n], on the host), in this order."""
        device = self.keys.device
        self.keys, self.counts = self.keys[rows.to(device)], self.counts[rows.to(device)]
        self.parameters = self.parameters[rows]
        self._derive(device)

    def append(self, other: Choice) -> None:
        """Take the rows of another after the present ones."""
        self.keys, self.counts = torch.cat([self.keys, other.keys]), torch.cat([self.counts, other.counts])
        self.parameters = torch.cat([self.parameters, other.parameters])
        self._derive(self.keys.device)

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens int64 [n], logprobs float32 [n]) from logits [n, vocab]; each call is the next token of every row.

        Logprobs are of the temperature-scaled distribution before truncation; of the unscaled one for greedy rows.
        """
        scores = logits.float() if self.scale is None else logits.float() / self.scale
        logprobs = torch.log_softmax(scores, -1)
        probabilities = logprobs.exp()
        if self.truncated is not None:
            probabilities[self.truncated] = self._truncate(probabilities[self.truncated])
        tokens = draw(probabilities, uniforms(self.keys, self.counts))
        if self.greedy is not None:
            tokens = torch.where(self.greedy, logits.argmax(-1), tokens)
        self.counts += 1
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _truncate(self, probabilities: Tensor) -> Tensor:
        """Zero outside the top k, then outside the smallest set of them that holds top_p of their mass."""
        assert self.truncated is not None
        top_p, top_k = self.parameters.to(probabilities.device)[self.truncated, 1:, None].unbind(1)
        ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[1], device=ordered.device)
        ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), 0.0)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill((before >= top_p * ordered.sum(-1, keepdim=True)) & (rank > 0), 0.0)
        return torch.zeros_like(probabilities).scatter_(1, places, ordered)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: int64 [n] from (unnormalised) probabilities [n, vocab] and uniforms [n] in [0, 1).

    A token of probability 0 is never drawn: the target stays below the total, and the first larger sum is its end.
    """
    cdf = probabilities.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniform[:, None].to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)  # NaN finds no place
