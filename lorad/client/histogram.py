"""Counts how rewards and lengths of samples are spread."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from lorad.client.choice import Amounts

_BINS = 10


class Bin(Struct, frozen=True):
    """Holds the values from `low` to `high`: all of them at once where these are the same, else without
    `high`, except in the last bin.
    """

    low: float
    high: float
    count: int


class SampleSpread(Struct, frozen=True):
    """Says how samples are spread.

    Attributes:
        samples: how many samples there are.
        unscored: how many of them have no reward.
        rewards: bins of rewards, from the least.
        lengths: bins of sampled tokens, from the least.
    """

    samples: int
    unscored: int
    rewards: list[Bin]
    lengths: list[Bin]


def spread(samples: Sequence[Amounts]) -> SampleSpread:
    """Count rewards and lengths of samples."""
    rewards = [float(sample.reward) for sample in samples if sample.reward is not None]
    finite = [reward for reward in rewards if math.isfinite(reward)]
    lengths = bins(sample.size for sample in samples)
    return SampleSpread(len(samples), len(samples) - len(finite), bins(finite), lengths)


def bins(values: Iterable[float]) -> list[Bin]:
    """Count values: each one that occurs where these are few, else ranges of the same width.

    values: finite numbers. Ranges of whole numbers begin at whole numbers.
    """
    counts = Counter(values)
    if len(counts) <= _BINS:
        return [Bin(value, value, counts[value]) for value in sorted(counts)]
    low = min(counts)
    width = (max(counts) - low) / _BINS
    if all(value == int(value) for value in counts):
        width = math.floor(width) + 1
    places = Counter[int]()
    for value, count in counts.items():
        places[min(int((value - low) / width), _BINS - 1)] += count
    last = max(places)
    return [Bin(low + place * width, low + (place + 1) * width, places[place]) for place in range(last + 1)]
