"""What the sides of a measure have in common: the same data in the same round, and how it is measured and
reported.

Everything is CPU time of one process on one thread: wall time on a shared box measures the neighbours. No
prompt comes twice, neither in a turn nor in another round, so that no cache of any side can help.
"""

import argparse
import json
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path

import numpy as np

from lorad.rl.tasks import Problem, problem

TINY = Path(__file__).resolve().parents[2] / "lorad" / "models" / "tiny"
TASK = "sort"
PROMPTS, GROUP = 16, 8  # a step has 16 prompts with 8 samples each
MAX_NEW_TOKENS = 16
RANK, ALPHA = 16, 32
LEARNING_RATE = 1e-3
STEPS_OF_A_ROUND = 100
EOS = 1

Figures = dict[str, list[float]]  # name -> one value for each repetition


@dataclass(frozen=True)
class Turn:
    """One turn of one side. number: of the round, which data and seeds depend on. models: made by
    `models.py`.
    """

    number: int
    repeats: int
    models: Path

    def call(self, index: int) -> int:
        """A number that no other call of any round has."""
        return self.number * STEPS_OF_A_ROUND + index


Side = Callable[[Turn], Figures]


def play(sides: Mapping[str, Side]) -> None:
    """The command line of a measure: one side's turn, its figures as a JSON line on stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=sides)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--models", type=Path, required=True, help="a directory made by benchmarks.kit.models"
    )
    options = parser.parse_args()
    figures = sides[options.side](Turn(options.round, options.repeats, options.models))
    memory = figures.pop("memory", [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    print(json.dumps({"side": options.side, "figures": figures, "peak_rss_mb": max(memory)}), flush=True)


class Stopwatch:
    """CPU seconds of this process since the last lap."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def lap(self) -> float:
        now = time.process_time()
        seconds, self._last = now - self._last, now
        return seconds


def problems_of(step: int, number: int = PROMPTS) -> list[Problem]:
    """The prompts of one step, the same on every side, and no other step's. number: at most PROMPTS."""
    distinct = _distinct()
    while len(distinct.found) < (step + 1) * PROMPTS:
        distinct.more()
    return distinct.found[step * PROMPTS :][:number]


class _Distinct:
    """The builtin problems in order, those left out whose prompt came before."""

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self._fresh = self._walk()

    def more(self) -> None:
        self.found += islice(self._fresh, PROMPTS)

    @staticmethod
    def _walk() -> Iterator[Problem]:
        seen: set[str] = set()
        for index in count():
            made = problem(TASK, "train", 0, index)
            if made.prompt not in seen:
                seen.add(made.prompt)
                yield made


@cache
def _distinct() -> _Distinct:
    return _Distinct()


def held_out(number: int = 256) -> list[Problem]:
    """What greedy evaluations are made of."""
    return [problem(TASK, "test", 0, index) for index in range(number)]


def random_ids(call: int, number: int, length: int, vocab: int) -> np.ndarray:
    """int64 [number, length]: the prompts of a call to a model with random weights."""
    return np.random.default_rng([call, number, length]).integers(4, vocab, (number, length))


def uneven_lengths(call: int, number: int, mean: int = 16, cap: int = 64) -> list[int]:
    """Geometric lengths, at least 1, the tail cut at `cap`."""
    rng = random.Random(f"lengths {call}")
    lengths = []
    for _ in range(number):
        length = 1
        while length < cap and rng.random() >= 1 / mean:
            length += 1
        lengths.append(length)
    return lengths


def exact_match(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [float(completion == answer) for completion, answer in zip(completions, answers, strict=True)]
