"""Sample one token per row from logits. The randomness of a row depends on its own seed and token count
alone.

Left out: penalties, beam search, minimum lengths, grammars.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

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


CANDIDATES = 4096
"""Words among which a bounded draw looks for those that `top_p` and `top_k` leave."""
_MANY_WORDS = 16384  # from so many on a GPU draws by blocks
_BLOCK = 128  # words of one, which divides the vocabularies of most models
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
    """Which of the steps of `sample` any row needs: decided on the host, so that no device is asked.

    whole: Whether any row draws among all words.
    bounded: Whether rows that `CANDIDATES` words may not be enough for get the token -1, so that no
        vocabulary is sorted: the caller draws them again.
    """

    scaled: bool
    truncated: bool
    greedy: bool
    whole: bool
    bounded: bool = False

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> "Steps":
        every = list(samplings)
        drawn = [s.top_p < 1 or s.top_k > 0 for s in every if s.temperature > 0]
        return cls(
            scaled=any(s.temperature not in (0.0, 1.0) for s in every),
            truncated=any(drawn),
            greedy=any(s.temperature == 0 for s in every),
            whole=not all(drawn),
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
    uniform = uniforms(keys, counts)
    if not steps.truncated:
        tokens = draw(probabilities, uniform)
    elif not steps.bounded:
        tokens = draw(truncate(probabilities, top_p[:, None], top_k[:, None]), uniform)
    else:
        left, words, is_whole = candidates(probabilities, top_p[:, None], top_k[:, None])
        tokens = words.gather(1, draw(left, uniform)[:, None])[:, 0]
        tokens = torch.where(is_whole, tokens, -1)
        if steps.whole:
            has_all = (top_p >= 1) & (top_k == 0)
            tokens = torch.where(has_all, draw(probabilities, uniform), tokens)
    if steps.greedy:
        tokens = torch.where(temperature == 0, logits.argmax(-1), tokens)
    return tokens, probabilities.gather(1, tokens[:, None].clamp(min=0))[:, 0].log()


def truncate(probabilities: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero outside the top k, then outside the smallest set of them that holds top_p of their mass. Of equal
    ones the first are kept.

    Args:
        probabilities: A number for each word, [n, vocab]; the result has their shape.
        top_p, top_k: Bounds of each row, [n, 1]; 1 and 0 are none.
    """
    ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
    ordered = _first(ordered, top_k)
    left = _within(ordered, top_p, _sum(ordered))
    return torch.zeros_like(probabilities).scatter_(1, places, left)


def candidates(
    probabilities: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `truncate` does, and sort no more than `CANDIDATES` words of each row.

    Returns what is left of their probabilities, the words, int64, both [n, candidates] in the order of the
    words, and whether they hold all that `truncate` leaves, bool [n].
    """
    count = min(CANDIDATES, probabilities.shape[1])
    largest, words = probabilities.topk(count)
    words, order = words.sort(-1)
    ordered, places = largest.gather(1, order).sort(dim=-1, descending=True, stable=True)
    last = ordered[:, -1:]
    ordered = _first(ordered, top_k)
    left = _within(ordered, top_p, torch.where(top_k > 0, _sum(ordered), _sum(probabilities)))
    # a word that is left out may be as probable as the last candidate, so that one must not be in use
    least = left.masked_fill(left == 0, float("inf")).amin(-1, keepdim=True)
    is_whole = (least > last) & (top_k <= count)
    is_whole |= last == 0
    if count == probabilities.shape[1]:
        is_whole = torch.ones_like(is_whole)
    return torch.zeros_like(left).scatter_(1, places, left), words, is_whole[:, 0]


def _first(ordered: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but the first top_k numbers of each row; none where that is 0."""
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    return ordered.masked_fill((top_k > 0) & (rank >= top_k), 0.0)


def _within(ordered: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Zero all but the first numbers of a falling order that hold top_p of a total, the first in any case."""
    before = _running_sums(ordered) - ordered
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    return ordered.masked_fill((before >= top_p * total) & (rank > 0) & (top_p < 1), 0.0)


def _sum(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.sum(-1, keepdim=True, dtype=_SUMS.get(probabilities.device.type))


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: int64 [n] from (unnormalised) probabilities [n, vocab] and uniforms [n] in [0,
    1).

    A token of probability 0 is never drawn: the target stays below the total, and the first larger sum is its
    end. A GPU sums a row up block by block: a sum that runs through all of it keeps one multiprocessor busy.
    """
    if probabilities.device.type == "cuda" and probabilities.shape[1] >= _MANY_WORDS:
        return draw_in_blocks(probabilities, uniform)
    cdf = _running_sums(probabilities)
    return _place(cdf, uniform[:, None].to(cdf.dtype) * cdf[:, -1:])[:, 0]


def draw_in_blocks(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Do what `draw` does: choose a block of words by the sums of blocks, then a word in it."""
    rows, words = probabilities.shape
    if words % _BLOCK:
        probabilities = F.pad(probabilities, (0, -words % _BLOCK))
    blocks = probabilities.view(rows, -1, _BLOCK)
    sums = _running_sums(blocks.sum(-1, dtype=_SUMS.get(blocks.device.type)))
    target = uniform[:, None].to(sums.dtype) * sums[:, -1:]
    block = _place(sums, target)
    before = F.pad(sums, (1, 0)).gather(1, block)
    within = _running_sums(blocks.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0])
    word = _place(within, target - before)
    return (block * _BLOCK + word)[:, 0].clamp_(max=words - 1)


def _place(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return where running sums [n, m] exceed a target [n, 1] first; at the end one that is not below the
    last is, and NaN.
    """
    total = sums[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
