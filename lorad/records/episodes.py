"""What is kept of an episode."""

from typing import Any, Literal

from msgspec import Struct

EpisodeEnd = Literal["done", "turns", "tokens", "length", "failed"]
"""done: the environment ended it. turns, tokens: env.turns or env.max_tokens did. length: a turn was cut off.
failed: the environment gave no answer."""

LIMITS: tuple[EpisodeEnd, ...] = ("turns", "tokens", "length")


_Outcome = Literal["ok", "invalid_json", "unknown_tool"]


class Task(Struct, frozen=True):
    """What an episode is about: a row of the data."""

    row: dict[str, Any]
    seed: int


class ToolCall(Struct, frozen=True):
    """A call of a tool, as the model wrote it.

    arguments: None where they cannot be read.
    error: what was wrong, in words for the model; "" for a call that can be made.
    written: the text of the call, with its marks.
    """

    name: str
    arguments: dict[str, Any] | None
    error: str = ""
    outcome: _Outcome = "ok"
    written: str = ""


class EpisodeTurn(Struct, frozen=True):
    """A turn of the model, and what the environment answered.

    tokens: how many the model sampled.
    observation: the answer as text; "" where the episode was over.
    observed: tokens of the answer; 0 where a new row begins with it.
    seconds: how long the environment took.
    row: the number, from 0, of the row of the episode that the turn is in.
    calls: the tools that it called, including calls that could not be made.
    tool_errors: how many calls went wrong.
    """

    text: str
    finish: str
    tokens: int
    reward: float = 0.0
    observation: str = ""
    observed: int = 0
    seconds: float = 0.0
    row: int = 0
    calls: tuple[ToolCall, ...] = ()
    tool_errors: int = 0


class Fork(Struct, frozen=True):
    """The beginning of a further row of an episode: its tokens from `at` on are behind `prompt`."""

    at: int
    prompt: list[int]
