"""What the five verbs share: the frozen inputs of one attempt, and what changes from step to step."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct

from lorad.box.paths import RunDir
from lorad.driver.attempt.main import StopFlag
from lorad.driver.rewards import Rewarder, Score, Scoring
from lorad.driver.user.functions import UserFunctions
from lorad.envs.host import Hosts
from lorad.envs.programs import ProgramHosts
from lorad.protocol.batch import Batch, PolicyTargets, ValueTargets
from lorad.protocol.connection import Connection
from lorad.protocol.driver_params import DriverParams
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import JournalWriter
from lorad.records.episodes import EpisodeEnd, EpisodeTurn, Fork, Task
from lorad.rl.completions.widths import Widths
from lorad.rl.data import Dataset, Example
from lorad.rl.reward import RewardInput
from lorad.rl.streaming.stream import Bookmark
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Side
from lorad.spec.kept import MAIN, EvalSet
from lorad.spec.model import Spec

_IN_WORDS = {
    "sample": "sampling",
    "score": "grading",
    "weigh": "computing log-probabilities",
    "train": "training",
    "publish": "publishing",
    "checkpoint": "writing a checkpoint",
}
"""What a driver does, by the verbs of `Session.timed`."""


class State(Struct):
    """What a resume restores.

    position: prompts consumed by the steps done.
    version: the number of the current version.
    changed: the step whose update made the present weights.
    published: the step whose weights `version` has.
    failed_rewards, skipped_updates: how many there were in the run until now.
    idle_steps: how many steps of the run until now changed no weight.
    skipped_steps: how many of the last steps in a row had only updates that were skipped, see `Trained`.
    baseline: the moving mean of rewards where algorithm.baseline is `moving`; None before the first step.
    kl_coef: the coefficient adapted to algorithm.kl.target; None where it is the spec's.
    reference_sha256: digest of what algorithm.kl.reset_every put in the reference's place; "" before.
    critic_steps: steps in which the critic learned; a fork that takes a critic along begins with
        algorithm.critic.warmup_steps.
    stream: where to read on in data that are streamed.
    ratings: the mean reward of the last group of each row that is easy or hard, see `data.difficulty`.
    """

    step: int = 0
    position: int = 0
    version: int = -1
    next_version: int = 0
    changed: int = 0
    published: int = 0
    failed_rewards: int = 0
    skipped_updates: int = 0
    skipped_steps: int = 0
    idle_steps: int = 0
    baseline: float | None = None
    kl_coef: float | None = None
    reference_sha256: str = ""
    critic_steps: int = 0
    stream: Bookmark | None = None
    ratings: dict[str, float] = {}


class _Sampler(AbstractContextManager["_Sampler", None], Protocol):
    """Sampling that runs ahead of training, see `ahead.py`."""

    def go_on(self, step: int) -> None:
        """Ask the version of `step`, which is the current one, for what may be sampled now."""

    def take(self, step: int) -> "Rollout":
        """Wait for the rollout for the step after `step`. Raises what sampling raised."""

    def put_back(self, rollout: "Rollout") -> None:
        """Keep the rollout that was taken last: it is not trained on now."""

    def of_earlier_versions(self) -> "list[Rollout]":
        """Wait for the rollouts of versions before the current one. Raises what sampling raised."""


@dataclass(frozen=True)
class Problems:
    """A set of held-out problems, and how they are sampled.

    rewarder: None for the run's.
    is_scored: whether the data have what the reward needs.
    """

    name: str
    settings: EvalSet
    examples: list[Example]
    rewarder: Rewarder | None = None
    is_scored: bool = True


@dataclass(frozen=True)
class Judges:
    """The rewards and environments of a run, or of a source of rows that has its own.

    spec: the spec as it holds for them.
    hosts: see `Session`.
    """

    spec: Spec
    rewarder: Rewarder
    hosts: Hosts | ProgramHosts | None


@dataclass
class Session:
    """One attempt of one run.

    own: the user's loss and advantage, where there are any.
    hosts: the environments, or agent programs; None where a sample is one completion.
    of_sources: who judges the rows of sources in the run's place, as in `Spec.of_sources`.
    ahead: None where no sampling runs ahead of training.
    plays_freely: whether episodes wait for nothing but their own turns, so that a resume makes others.
    records_routes: whether samples have routes, which the trainer replays.
    problems: the sets that are evaluated, the one of data.eval first.
    metrics: what the last step measured; empty before one.
    evals: step and figures of the evaluations that count.
    standstill: why the run ends before its last step; "" while it does not.
    patient_from: the step at which it ended so before, from which eval.stop counts.
    tokens_per_microbatch: as the pool has it.
    current_sha256: digest of the current version's tensors.
    movement: how far the version that the step published is from others, see `movement`.
    reference: the directory of what algorithm.kl.reset_every put in the reference's place; None before.
    checkpointed: when the last checkpoint of this attempt was written, or the attempt began, by
        time.monotonic().
    """

    spec: Spec
    params: DriverParams
    run_dir: RunDir
    pool: Connection
    journal: JournalWriter
    tokenizer: Tokenizer
    train_data: Dataset
    problems: list[Problems]
    rewarder: Rewarder
    own: UserFunctions
    hosts: Hosts | ProgramHosts | None
    stop: StopFlag
    of_sources: Mapping[tuple[Side, str], Judges] = field(default_factory=dict)
    state: State = field(default_factory=State)
    seconds: dict[str, float] = field(default_factory=dict)
    ahead: _Sampler | None = None
    plays_freely: bool = False
    records_routes: bool = False
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    evals: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    standstill: str = ""
    patient_from: int = 0
    tokens_per_microbatch: int = 0
    current_sha256: str = ""
    movement: dict[str, float] = field(default_factory=dict)
    reference: Path | None = None
    checkpointed: float = field(default_factory=time.monotonic)

    @cached_property
    def widths(self) -> Widths:
        return Widths(self.tokenizer)

    @property
    def held_out(self) -> list[Example]:
        """Return the problems of data.eval; their completions are those of the data, where it has any."""
        return next((problems.examples for problems in self.problems if problems.name == MAIN), [])

    @property
    def judged(self) -> list[Judges]:
        """Return all who judge samples, the run's first."""
        return [Judges(self.spec, self.rewarder, self.hosts), *self.of_sources.values()]

    def parts(self, examples: Sequence[Example], side: Side) -> "list[tuple[Session, list[int]]]":
        """Split examples by who judges them: the session as it holds for each part, and their places."""
        places = dict[str, list[int]]()
        for place, example in enumerate(examples):
            label = example.source if (side, example.source) in self.of_sources else ""
            places.setdefault(label, []).append(place)
        parts = [(self, places.pop(""))] if "" in places else []
        for label in sorted(places):
            own = self.of_sources[side, label]
            session = dataclasses.replace(self, spec=own.spec, rewarder=own.rewarder, hosts=own.hosts)
            parts.append((session, places[label]))
        return parts

    @property
    def steps_left(self) -> bool:
        return self.state.step < self.params.steps

    @property
    def kl_coef(self) -> float:
        """Return the coefficient of the KL penalty, as it was adapted."""
        adapted = self.state.kl_coef
        return self.spec.algorithm.kl_coef if adapted is None else adapted

    def name_of(self, version: int) -> str:
        """Return the engine-side name of one of the run's versions."""
        return f"{self.params.run}@{version}"

    @contextmanager
    def timed(self, verb: str) -> Iterator[None]:
        """Add the seconds of a block to the step's `seconds_<verb>`; the heartbeat names the verb."""
        HEART.work(verb)
        HEART.tell(_IN_WORDS[verb])
        start = time.perf_counter()
        try:
            yield
        finally:
            HEART.tell("")
            self.seconds[verb] = self.seconds.get(verb, 0.0) + time.perf_counter() - start

    def warn(self, message: str) -> None:
        self.journal.append("warning", self.state.step, {"message": message})
        print(f"warning: {message}", flush=True)


class Episode(Struct, frozen=True):
    """An episode that is over.

    metrics: the last value of each name that the environment gave.
    error: why it failed.
    has_tools: whether the model could call any.
    """

    task: Task
    turns: list[EpisodeTurn]
    end: EpisodeEnd
    metrics: dict[str, float] = {}
    error: str = ""
    has_tools: bool = False

    @property
    def text(self) -> str:
        return "".join(f"{turn.text}{turn.observation}" for turn in self.turns)

    @property
    def score(self) -> Score:
        seconds = sum(turn.seconds for turn in self.turns)
        reward = None if self.end == "failed" else math.fsum(turn.reward for turn in self.turns)
        return Score(reward, self.error, seconds)


class Sample(Struct, frozen=True, eq=False):
    """One completion, or one episode.

    tokens: int32 [t], all behind the prompt.
    logprobs: float32 [m], the engine's, of the tokens that it sampled.
    sampled: bool [t], which tokens it sampled; None where it sampled all.
    episode: None where the sample is a completion.
    forks: where its further rows begin, in order.
    routes: routes of the tokens; None where they are not known.
    prompt_routes: routes of the prompt of each row; empty where they are not known.
    """

    example: Example
    index: int
    version: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str
    text: str
    sampled: np.ndarray | None = None
    episode: "Episode | None" = None
    forks: tuple[Fork, ...] = ()
    routes: np.ndarray | None = None
    prompt_routes: tuple[np.ndarray, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of sampled tokens."""
        return self.logprobs.size

    def for_reward(self, tokenizer: Tokenizer, *, raw: bool) -> RewardInput:
        """Return the input of a reward. raw: whether a function asks for `raw_completion`."""
        tokens = self.tokens.tolist()
        text = tokenizer.decode(tokens, skip_special=False) if raw else ""
        return self.example.for_reward(self.text, self.finish, tokens, text)


@dataclass(frozen=True)
class Plan:
    """Samples to make for the step after `step` steps.

    position: prompts consumed before `examples`.
    version: number of the version that is to make them.
    trained: steps that this version has behind it.
    places: where `examples` stand behind `position`; nothing where no position counts.
    looked: prompts behind `position` that are not looked at again.
    ratings: see `State`.
    """

    step: int
    examples: list[Example]
    position: int
    version: int
    trained: int
    places: list[int] = field(default_factory=list)
    looked: int = 0
    ratings: Mapping[str, float] = field(default_factory=dict)

    @property
    def staleness(self) -> int:
        """Return how many steps the version is behind the newest one when its samples are trained on."""
        return self.step - self.trained


@dataclass(frozen=True)
class Rollout:
    """The samples of one step, group by group; a group has one prompt.

    places: where the prompts stand behind the position of the plan.
    consumed: prompts that the next step does not look at again.
    sampled: how many prompts were sampled.
    tokens: how many tokens all of their samples have.
    seconds: wall time of sampling.
    waited: the part of it spent waiting for a turn in the pool.
    scoring: the scores, some of which may still be computed.
    left_out: the mean reward of each row that was sampled and is none of `groups`.
    """

    plan: Plan
    groups: list[list[Sample]]
    places: list[int]
    consumed: int
    sampled: int
    tokens: int
    seconds: float
    waited: float
    scoring: Scoring
    left_out: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]


@dataclass(frozen=True)
class StepSelection:
    """Which samples take part in a step.

    scored: bool [samples], which have a reward.
    counted: bool [samples], which count in the normaliser.
    trained: bool [samples], which reach the trainer.
    rewards: float32, by sample that is scored.
    worth: float32, the rewards with the costs of length.
    sizes: int32 [groups], how many samples of each are scored.
    flat: bool [groups], the worth of all samples is equal, or there are fewer than two.
    """

    scores: list[Score]
    scored: np.ndarray
    rewards: np.ndarray
    worth: np.ndarray
    sizes: np.ndarray
    counted: np.ndarray
    trained: np.ndarray
    flat: np.ndarray


@dataclass(frozen=True)
class TrainBatch:
    """The samples that are trained on, group by group, and the log-probabilities of their tokens.

    `sampler`, `old`, `reference` and `values` are float32 [T], by token that the policy sampled.

    rows: int [S], their places among the samples of the rollout.
    groups: int [G], the places of their groups.
    lengths: int [S], sampled tokens of each sample.
    sizes: int [G], samples of each group.
    offsets: int [G + 1], where each group begins among the batch's groups, see `sampling/rows.py`.
    old: the trainer's before the first update; None where the update's own forward pass serves.
    reference: None without a KL term.
    values: the critic's; None without one.
    """

    batch: Batch
    rows: np.ndarray
    groups: np.ndarray
    sampler: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    old: np.ndarray | None = None
    reference: np.ndarray | None = None
    values: np.ndarray | None = None

    def part(self, groups: slice) -> Batch:
        """Return the tokens of some of the groups."""
        return self.batch.part(slice(int(self.offsets[groups.start]), int(self.offsets[groups.stop])))

    def samples(self, groups: slice) -> slice:
        """Return which samples are of some of the groups."""
        return slice(*np.cumsum([0, *self.sizes])[[groups.start, groups.stop]].tolist())

    def tokens(self, groups: slice) -> slice:
        """Return which of the sampled tokens are of some of the groups."""
        samples = self.samples(groups)
        return slice(*np.cumsum([0, *self.lengths])[[samples.start, samples.stop]].tolist())


@dataclass(frozen=True)
class Weighed:
    """What the trainer gets.

    advantages: float32 [samples of the rollout], the mean over the tokens of each; NaN where it has none.
    importance: float [T], see algorithm.correction; None without one.
    kl: mean over the tokens, where the penalty is in the reward.
    critic: what the critic gets; None without one.
    """

    training: TrainBatch
    targets: PolicyTargets
    advantages: np.ndarray
    importance: np.ndarray | None = None
    kl: float | None = None
    critic: ValueTargets | None = None
