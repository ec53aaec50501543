"""The section `data`: where prompts and completions come from."""

import math
import re
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lorad.spec.env import VERIFIERS, EnvSpec
from lorad.spec.numbers import Fraction, Part, Positive
from lorad.spec.reward import RewardSpec

GENERATED = "reasoning_gym:"  # a source of rows that an interpreter makes
MADE = (GENERATED, VERIFIERS)
_MOST_SOURCES = 64
_LABEL_CHARACTERS = 40
DataFormat = Literal["auto", "messages", "completion", "preference", "labels"]


class _SourceSpec(Part, frozen=True):
    """A source of rows among several, with what is its own; a number alone is its weight.

    Attributes:
        weight: its share, beside the weights of the others.
        env: the environment in which its rows are played, instead of the run's: a name, or what `env` of a
            run may be.
        reward: how completions of its rows are scored, without the run's environment or reward: what `reward`
            of a run may be.
    """

    weight: float = 1.0
    env: str | EnvSpec | None = None
    reward: str | RewardSpec | Annotated[list[str | RewardSpec], Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.env is not None and self.reward is not None:
            raise ValueError("an environment gives the reward of an episode: name one of env and reward")

    @property
    def played(self) -> EnvSpec:
        """Return its environment, which has no name where it has none."""
        return EnvSpec(name=self.env) if isinstance(self.env, str) else self.env or EnvSpec()


Sources = str | list[str] | dict[str, float | _SourceSpec]
Side = Literal["train", "eval"]
SIDES: tuple[Side, ...] = ("train", "eval")


class _Difficulty(Part, frozen=True):
    """Which prompts are sampled again, by the mean reward of their last group (as prime-rl's pools).

    Attributes:
        easy: mean reward from which a prompt is easy.
        hard: mean reward up to which a prompt is hard.
        keep_easy: share of the easy prompts that is sampled when they come again.
        keep_hard: share of the hard prompts that is sampled when they come again.
    """

    easy: float = 1.0
    hard: float = 0.0
    keep_easy: Fraction = 0.1
    keep_hard: Fraction = 0.1

    def __post_init__(self) -> None:
        if not self.hard < self.easy:
            raise ValueError(f"hard {self.hard:g} is not below easy {self.easy:g}")


class Data(Part, frozen=True):
    """Where prompts come from, and completions where those are trained on.

    Attributes:
        train: a builtin task (`sort`, `reverse`, `lookup`), a file of rows (.jsonl,
            .parquet, .csv, .json), a hub dataset, or `reasoning_gym:TASK`, whose rows reasoning-gym makes.
            With `env.name: verifiers:ID` it is that environment, which has rows of its own.
            `[a.jsonl, b.parquet]` are the rows of both together; `{a.jsonl: 7, b.jsonl: 3}` mixes them in
            these shares, whatever their sizes. `{a.jsonl: {weight: 7, reward: gsm8k}, b.jsonl: {weight: 3,
            env: lookup}}` judges each by its own (docs/data.md).
        eval: held-out problems, named in the same way. null is the held-out split of a builtin task
            and of reasoning_gym, and no evaluation for a file. Of an environment of verifiers it is what that
            evaluates on, else one prompt in 16.
        args: arguments of a reasoning_gym task, such as `{size: 8192, max_word_len: 7}`; without a size there
            are 4096 rows, of which one in 16 is held out.
        python: interpreter that makes the rows of reasoning_gym; null is lorad's.
        prompts_per_step: prompts of a step; each is sampled algorithm.group_size times. With sft and dpo it
            is the number of rows of a step.
        format: what a row of sft or dpo is (docs/data.md has examples). messages is a chat, of which every
            assistant turn is trained; completion is a prompt and a completion, each as text or as messages.
            Of dpo: preference is a chosen and a rejected completion, with a prompt or as whole chats, whose
            common turns are the prompt then; labels is a prompt, a completion, and true or false. auto looks
            at the first row.
        prompt_key: column that holds the prompt; `a.b` is the key b of the column a, here and below.
        prompt_format: the prompt as text with columns in braces, as in `Q: {question}` or `{a.b}`; null takes
            the column of prompt_key.
        completion_key: column that holds the completion.
        messages_key: column that holds the chat; by default also `conversations`, where ShareGPT has it.
        chosen_key: column that holds the chosen completion; by default also where OpenAI has it.
        rejected_key: column that holds the rejected completion; by default also where OpenAI has it.
        label_key: column that says whether a completion is desired.
        answer_key: column of the answer; by default also where rows for verl and SkyRL have it.
        max_prompt_tokens: longest prompt, in tokens; the default gives way where the model has less room.
        max_sample_tokens: longest sample of sft and dpo, prompt and completion together, in tokens; the
            default gives way where the model has less room.
        too_long: drop or truncate longer prompts; with sft and dpo, longer samples.
        chat_template: auto uses the tokenizer's chat template where it has one.
        chat_template_kwargs: further variables of the chat template, such as `{enable_thinking: false}`.
        system: system prompt of chats that do not bring their own.
        shuffle: shuffle the rows.
        difficulty: leave out prompts that nearly all or nearly no samples answer: `{}` for the defaults, or
            `{easy: 0.9, hard: 0.1}`, rewards between which a prompt is always sampled. null samples all. It
            works from the second round of the data on; what is known is in checkpoints.
        streaming: read the rows of a hub dataset (or a file) while the run trains, instead of all of them
            before it. Without data.eval one row in 16 is held out and evaluated.
        buffer: rows of a stream that are in memory, and shuffled among themselves.
    """

    train: Sources = "sort"
    eval: Sources | None = None
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    python: str | None = None
    prompts_per_step: Positive = 16
    format: DataFormat = "auto"
    prompt_key: str = "prompt"
    prompt_format: str | None = None
    completion_key: str = "completion"
    messages_key: str = "messages"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    label_key: str = "label"
    answer_key: str = "answer"
    max_prompt_tokens: Positive = 512
    max_sample_tokens: Positive = 2048
    too_long: Literal["drop", "truncate"] = "drop"
    chat_template: Literal["auto", "never"] = "auto"
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    system: str | None = None
    shuffle: bool = True
    difficulty: _Difficulty | None = None
    streaming: bool = False
    buffer: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000

    def __post_init__(self) -> None:
        for key, sources in (("train", self.train), ("eval", self.eval)):
            names = names_of(sources)
            if sources is not None and not (0 < len(names) <= _MOST_SOURCES and all(names)):
                raise ValueError(f"{key} names {len(names)} sources, not 1 to {_MOST_SOURCES}")
            if len(set(names)) < len(names):
                raise ValueError(f"{key} names a source twice; a weight says how much of it there is")
            if isinstance(sources, dict) and not all(
                w > 0 and math.isfinite(w) for w in map(weight_of, sources.values())
            ):
                raise ValueError(f"{key}: a weight is a number above 0")
        if (self.args or self.python) and not any(
            source.startswith(GENERATED) for side in (self.train, self.eval) for source in names_of(side)
        ):
            raise ValueError("args and python are for reasoning_gym:TASK, and neither train nor eval is one")
        if self.chat_template == "never" and (self.chat_template_kwargs or self.system):
            raise ValueError(
                "system and chat_template_kwargs need the chat template, and chat_template is never"
            )


def names_of(sources: Sources | None) -> list[str]:
    """Return every source that a key names."""
    if sources is None:
        return []
    return [sources] if isinstance(sources, str) else [*sources]


def single(sources: Sources | None) -> str:
    """Return the one source that a key names by itself; "" where it names several, or none."""
    return sources if isinstance(sources, str) else ""


def labels_of(sources: Sources) -> dict[str, str]:
    """Return what the rows of each source of several are known by: its last name where only it has that."""
    labels = dict[str, str]()
    for name in names_of(sources):
        last, whole = (re.sub(r"[^A-Za-z0-9_.-]+", "_", text) for text in (name.rpartition("/")[2], name))
        choices = [text[-_LABEL_CHARACTERS:] for text in (last, whole)]
        numbered = (f"source-{number}" for number in range(len(labels), 2 * _MOST_SOURCES))
        free = (label for label in chain(choices, numbered) if label and label not in labels.values())
        labels[name] = next(free)
    return labels


def weight_of(share: float | _SourceSpec) -> float:
    """Return the weight of a source, which may have more of its own."""
    return share.weight if isinstance(share, _SourceSpec) else share


def sources_with_own(sources: Sources | None) -> dict[str, _SourceSpec]:
    """Return the sources with an environment or a reward of their own, by their names."""
    entries = sources.items() if isinstance(sources, dict) else ()
    return {
        name: share
        for name, share in entries
        if isinstance(share, _SourceSpec) and (share.env is not None or share.reward is not None)
    }
