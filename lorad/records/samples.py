"""A sample of a step, of an evaluation or of a trial."""

from msgspec import Struct

from lorad.protocol.preflight import ErrorFacts
from lorad.records.episodes import EpisodeEnd, EpisodeTurn, Fork, Task
from lorad.records.measured import Number


class Sample(Struct, frozen=True):
    step: int
    version: str | int = ""  # run@number
    prompt_id: str = ""
    index: int = 0  # within its group
    prompt: str = ""
    completion: str = ""
    answer: str | None = None
    reward: Number | None = None
    advantage: Number | None = None
    finish: str | None = None
    error: str | None = None  # why its reward failed
    rewards: dict[str, Number | None] = {}  # components by name
    tokens: list[int] = []  # behind the prompt
    logprobs: list[Number | None] = []  # of the tokens that the model sampled
    widths: list[int] = []  # characters that each of these made: of the completion, or of its turn
    length: int | None = None  # tokens that the model sampled, where `tokens` are left out
    logprob: float | None = None  # mean of `logprobs`, where these are left out
    task: Task | None = None  # of an episode
    turns: list[EpisodeTurn] = []
    end: EpisodeEnd | None = None
    rows: int = 1  # in which it is trained: one more for each time that the history was replaced
    forks: list[Fork] = []
    set: str = ""  # of an evaluation: the set of problems
    problem: int | None = None  # of an evaluation: its number in the set, from 1

    @property
    def ending(self) -> str:
        """Return how the episode ended; for a single completion, why the engine stopped."""
        return str(self.end or self.finish or "")

    @property
    def size(self) -> int:
        """Return how many tokens the model sampled."""
        if self.length is not None:
            return self.length
        return sum(turn.tokens for turn in self.turns) if self.turns else len(self.tokens)

    @property
    def turn_count(self) -> int:
        return len(self.turns) or 1

    @property
    def searched(self) -> list[str]:
        """Return the texts that a search looks in."""
        spoken = [text for turn in self.turns for text in (turn.text, turn.observation)]
        return [self.prompt, *(spoken or [self.completion])]


class TrialEvent(Struct, frozen=True):
    """What happens in a trial of a spec.

    kind: `phase`, `sample`, `idle` when nothing happens, `end`.
    text: the name of the phase.
    seconds: how long the pool took; known at the end.
    error: why it ended, where it did not end well.
    """

    kind: str
    text: str = ""
    sample: Sample | None = None
    seconds: float = 0.0
    error: ErrorFacts | None = None
