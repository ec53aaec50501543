"""What the five verbs share: the frozen inputs of one attempt and the few things that change from step to step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import Struct

from lorad.driver.params import Params
from lorad.driver.rewards import Rewarder, Score
from lorad.paths import RunDir
from lorad.protocol.connection import Connection
from lorad.protocol.journal import JournalWriter
from lorad.rl.data import Dataset, Example
from lorad.rl.reward import RewardInput
from lorad.rl.tokenizer import Tokenizer
from lorad.spec_text import from_json
from lorad.specs import Spec


class StopFlag:
    """Set by SIGTERM: a graceful stop is wanted."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, *_: object) -> None:
        self.wanted = True


class State(Struct):
    """What a resume restores. `position`: prompts consumed; `version`: the current one's number."""

    step: int = 0
    position: int = 0
    version: int = -1
    next_version: int = 0


@dataclass
class Session:
    """One attempt of one run."""

    spec: Spec
    params: Params
    run_dir: RunDir
    pool: Connection
    journal: JournalWriter
    tokenizer: Tokenizer
    train_data: Dataset
    eval_data: list[Example]
    rewarder: Rewarder
    stop: StopFlag
    state: State = field(default_factory=State)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def steps_left(self) -> bool:
        return self.state.step < self.params.steps

    @property
    def current(self) -> str:
        """The engine-side name of the current version."""
        return f"{self.params.run}@{self.state.version}"

    @contextmanager
    def timed(self, verb: str) -> Iterator[None]:
        """Add the wall seconds of a block to the step's `seconds_<verb>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[verb] = self.seconds.get(verb, 0.0) + time.perf_counter() - start

    def warn(self, message: str) -> None:
        self.journal.append("warning", self.state.step, {"message": message})
        print(f"warning: {message}", flush=True)


class Sample(Struct, frozen=True, eq=False):
    """One completion. tokens: int32 [t]; logprobs: float32 [t], the engine's."""

    example: Example
    index: int
    version: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str
    text: str

    def for_reward(self) -> RewardInput:
        e = self.example
        return RewardInput(prompt=e.prompt, completion=self.text, answer=e.answer, finish=self.finish, row=e.row)


@dataclass(frozen=True)
class Rollout:
    """The samples of one step: groups[i] are the samples of examples[i]. `position`: before they were taken."""

    examples: list[Example]
    groups: list[list[Sample]]
    position: int
    version: int

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]

    @property
    def tokens(self) -> int:
        return sum(sample.tokens.size for sample in self.samples)


@dataclass(frozen=True)
class Weighed:
    """Rewards and advantages, float32 [samples]; bool [groups]: `alive` carry a gradient, of `flat` all rewards are
    equal."""

    scores: list[Score]
    rewards: np.ndarray
    advantages: np.ndarray
    alive: np.ndarray
    flat: np.ndarray


def load_spec(run_dir: RunDir, params: Params) -> Spec:
    """Of the attempt: a resume may have changed what does not define the adapter."""
    path = Path(params.spec) if params.spec else run_dir.spec
    return from_json(path.read_bytes())
