"""What an environment is, and what goes between it and the model."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from lorad.records.episodes import ToolCall

Message = dict[str, Any]
"""`{role, content}`, as the chat template takes it."""


class Turn(Struct, frozen=True):
    """What the model said.

    text: what it said without special tokens, calls of tools included.
    finish: `stop`, or `length` where it was cut off.
    calls: the environment's tools that it called, with arguments; only calls that can be made.
    """

    text: str
    finish: str
    calls: tuple[ToolCall, ...] = ()


class Observation(Struct, frozen=True):
    """What the environment answers.

    messages: what the model reads next, as text or as chat messages; None: the episode is over.
    reward: what this turn earns; an episode earns the sum.
    metrics: numbers by name; each step of the run shows the mean over the episodes that have them.
    replaces: `messages` are all that the model reads from here on, in place of what it has read and said.
    tool_errors: calls of the turn that went wrong.
    """

    messages: str | Sequence[Message] | None
    reward: float = 0.0
    metrics: Mapping[str, float] = {}
    replaces: bool = False
    tool_errors: int = 0


def shown(messages: str | Sequence[Message]) -> str:
    """Return what an environment said as people read it."""
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
        """Begin. row: the columns of the data. seed: the same for all episodes of the row."""

    def step(self, turn: Turn) -> Observation:
        """Answer what the model said."""

    def close(self) -> None:
        """Free what the episode holds; also called in its midst."""
