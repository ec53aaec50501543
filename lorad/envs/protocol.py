"""What an environment is, and what goes between it and the model."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from lorad.records.episodes import ToolCall

Message = dict[str, Any]  # `{role, content}`, as the chat template takes it


class Turn(Struct, frozen=True):
    """A turn of the model.

    text: Its words without special tokens, including calls of tools.
    finish: `stop`, or `length` where it was cut off.
    calls: Its calls of the environment's tools with arguments; only those that can be made.
    """

    text: str
    finish: str
    calls: tuple[ToolCall, ...] = ()


class Observation(Struct, frozen=True):
    """The environment's answer to a turn.

    messages: The model's next input, as text or as chat messages; None when the episode is over.
    reward: The reward of this turn; an episode earns the sum.
    metrics: Numbers by name; each step of the run shows the mean over the episodes that have them.
    replaces: Whether `messages` replace all that the model has read and said so far.
    tool_errors: The number of calls in the turn that went wrong.
    """

    messages: str | Sequence[Message] | None
    reward: float = 0.0
    metrics: Mapping[str, float] = {}
    replaces: bool = False
    tool_errors: int = 0


def shown(messages: str | Sequence[Message]) -> str:
    """Return messages as text for people."""
    if isinstance(messages, str):
        return messages
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


@runtime_checkable
class Env(Protocol):
    """One episode of one task: made, reset, stepped and closed. Its constructor takes `env.args`.

    It answers equal turns of one task with equal observations. So its process may be killed at any time: the
    turns so far bring a new one to the same place. All episodes of a task begin with the same words.

    It may have `tools`, which the chat template shows to the model once it is reset: functions with typed
    parameters and a docstring, or their descriptions in OpenAI's form. It may have `at_limit()`: what an
    episode earns that a limit of the run ends, beside the rewards of its turns.
    """

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begin with a row of the data, by its columns; the seed is the same for all its episodes."""

    def step(self, turn: Turn) -> Observation:
        """Answer a turn of the model."""

    def close(self) -> None:
        """Free the episode's resources, maybe amid the episode."""
