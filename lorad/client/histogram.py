"""Count how rewards and lengths of samples are spread."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from msgspec import Struct

from lorad.client.choice import AMOUNTS, Amounts
from lorad.records.samples import Sample

_BINS = 10


class Bin(Struct, frozen=True):
    """Counts values from `low` to below `high`; the last bin, and one with equal ends, also has `high`."""

    low: float
    high: float
    count: int


class AmountSpread(Struct, frozen=True):
    """How one amount of a run's samples of a step is spread.

    metric: the amount.
    counted: how many of the samples have the amount.
    mean: the mean over these.
    bins: bins from the least, the same for all runs.
    """

    run: str
    metric: str
    step: int
    samples: int
    counted: int
    mean: float | None
    bins: list[Bin]


class SampleSpread(Struct, frozen=True):
    """How rewards and lengths of samples are spread, in bins from the least.

    unscored: how many samples have no reward.
    lengths: bins of how many tokens were sampled.
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
    (counted,) = _shared_bins([values])
    return counted


def spreads(runs: Mapping[str, Sequence[Sample]], amount: str) -> list[AmountSpread]:
    """Count an amount of samples of several runs, in the same bins.

    runs: the samples of a step of each run; none is without.
    amount: one of AMOUNTS, or `reward/NAME` for a component of the reward.
    """
    component = amount.removeprefix("reward/")

    def value_of(sample: Sample) -> float | None:
        return AMOUNTS[amount](sample) if amount in AMOUNTS else sample.rewards.get(component)

    values = [
        [float(value) for value in map(value_of, samples) if value is not None and math.isfinite(value)]
        for samples in runs.values()
    ]
    counted = zip(runs.items(), values, _shared_bins(values), strict=True)
    return [
        AmountSpread(run, amount, samples[0].step, len(samples), len(own), fmean(own) if own else None, parts)
        for (run, samples), own, parts in counted
    ]


def _shared_bins(groups: Iterable[Iterable[float]]) -> list[list[Bin]]:
    """Count the values of several groups in the bins of all of them, see `bins`."""
    counted = [Counter(values) for values in groups]
    counts = sum(counted, Counter[float]())
    if len(counts) <= _BINS:
        return [[Bin(value, value, group[value]) for value in sorted(counts)] for group in counted]
    low = min(counts)
    high = max(counts)
    width = (high - low) / _BINS
    if all(value == int(value) for value in counts):
        width = math.floor(width) + 1

    def place(value: float) -> int:
        return min(int((value - low) / width), _BINS - 1)

    divided = []
    for group in counted:
        places = Counter[int]()
        for value, count in group.items():
            places[place(value)] += count
        edges = [low + number * width for number in range(place(high) + 2)]
        divided.append([Bin(*ends, places[number]) for number, ends in enumerate(pairwise(edges))])
    return divided
