"""What is kept of an episode."""

from typing import Any, Literal

from msgspec import Struct

EpisodeEnd = Literal["done", "turns", "tokens", "length", "failed"]
"""done: the environment ended it. turns, tokens: env.turns or env.max_tokens did. length: a turn was cut off.
failed: the environment gave no answer."""


class Task(Struct, frozen=True):
    """What an episode is about: a row of the data."""

    row: dict[str, Any]
    seed: int


class EpisodeTurn(Struct, frozen=True):
    """A turn of the model, and what the environment answered.

    tokens, observed: tokens of either. observation: as text; "" where the episode was over.
    seconds: that the environment took.
    """

    text: str
    finish: str
    tokens: int
    reward: float = 0.0
    observation: str = ""
    observed: int = 0
    seconds: float = 0.0
