"""What is kept of an episode."""

from typing import Any, Literal

from msgspec import Struct

from lorad.rl.tools.calls import Call

EpisodeEnd = Literal["done", "turns", "tokens", "length", "failed"]
"""done: the environment ended it. turns, tokens: env.turns or env.max_tokens did. length: a turn was cut off.
failed: the environment gave no answer."""

LIMITS: tuple[EpisodeEnd, ...] = ("turns", "tokens", "length")


class Task(Struct, frozen=True):
    """What an episode is about: a row of the data."""

    row: dict[str, Any]
    seed: int


class EpisodeTurn(Struct, frozen=True):
    """A turn of the model, and what the environment answered.

    tokens, observed: tokens of either; 0 of an observation that a new row begins with.
    observation: as text; "" where the episode was over.
    seconds: that the environment took.
    row: of the episode's rows, from 0, the one that the turn is in.
    calls: of tools; also those that could not be made. tool_errors: how many of them went wrong.
    """

    text: str
    finish: str
    tokens: int
    reward: float = 0.0
    observation: str = ""
    observed: int = 0
    seconds: float = 0.0
    row: int = 0
    calls: tuple[Call, ...] = ()
    tool_errors: int = 0


class Fork(Struct, frozen=True):
    """The beginning of a further row of an episode: its tokens from `at` on are behind `prompt`."""

    at: int
    prompt: list[int]
