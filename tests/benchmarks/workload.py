"""What both sides of the benchmark do, so that they do the same, and how it is measured.

Everything is CPU time of one process on one thread: wall time on a shared box measures the neighbours.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lorad.rl.tasks import Problem, problem

TINY = Path(__file__).resolve().parents[2] / "lorad" / "models" / "tiny"
TASK = "sort"
PROMPTS, GROUP = 16, 8  # a step has 16 prompts with 8 samples each
MAX_NEW_TOKENS = 16
FORCED_TOKENS = 32  # of the rollout measure: nobody stops early, so every side makes the same number of tokens
RANK, ALPHA = 16, 32
LEARNING_RATE = 1e-3
WARM_UP = 2  # steps or calls that are not counted


@dataclass
class Report:
    """What one process measured, warm-up left out. Seconds are CPU seconds; `rewards` has the mean of every step."""

    side: str
    version: str
    step_seconds: list[float] = field(default_factory=list)
    rollout_seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    peak_rss_mb: float = 0.0

    def print(self) -> None:
        """One JSON line on stdout, with the peak memory of this process where no other is set."""
        self.peak_rss_mb = self.peak_rss_mb or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(asdict(self)), flush=True)


class Stopwatch:
    """CPU seconds of this process since the last lap."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def lap(self) -> float:
        now = time.process_time()
        seconds, self._last = now - self._last, now
        return seconds


def problems_of(step: int) -> list[Problem]:
    """The prompts of one step, the same on every side."""
    return [problem(TASK, "train", 0, step * PROMPTS + index) for index in range(PROMPTS)]


def exact_match(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [float(completion == answer) for completion, answer in zip(completions, answers, strict=True)]


def arguments() -> tuple[str, int]:
    """(measure, repeats) of a side's command line: `step` or `rollout`, and how many are counted."""
    return sys.argv[1], int(sys.argv[2])
