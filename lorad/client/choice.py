"""Which samples of a step are chosen, and in which order.

Requests to the daemon, the options of `lorad samples` and the samples tab all use the same words.
"""

import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar, get_args

from msgspec import Struct

from lorad.errors import SpecError

Order = Literal["drawn", "reward", "advantage", "length", "turns"]
ORDERS: tuple[Order, ...] = get_args(Order)
TRUNCATED = "truncated"  # short for an ending that is one of CUT
CUT = ("length", "tokens")
HINT = "end:length  reward>0.5  length<=100  turns=2  failed  truncated  !end:done  words of the text"
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


class Amounts(Protocol):
    """What samples are ordered by.

    size: how many tokens the model sampled.
    turn_count: how many turns an episode has; 1 for a completion.
    """

    @property
    def reward(self) -> float | None: ...
    @property
    def advantage(self) -> float | None: ...
    @property
    def size(self) -> int: ...
    @property
    def turn_count(self) -> int: ...


class ScoredSample(Amounts, Protocol):
    """What samples are chosen by.

    error: why its reward failed.
    ending: why it ended.
    searched: the texts in which words are looked for.
    """

    @property
    def error(self) -> str | None: ...
    @property
    def ending(self) -> str: ...
    @property
    def searched(self) -> Sequence[str]: ...


_O = TypeVar("_O", bound=Amounts)
AMOUNTS: Mapping[str, Callable[[Amounts], float | None]] = {
    "reward": lambda sample: sample.reward,
    "advantage": lambda sample: sample.advantage,
    "length": lambda sample: sample.size,
    "turns": lambda sample: sample.turn_count,
}
_WORD = re.compile(rf'(!?)(?:(end):|({"|".join(AMOUNTS)})({"|".join(_SIGNS)}))?(?:"([^"]*)"?|(\S*))')


class _ChoiceWord(NamedTuple):
    """A word of `where`, which a sample fits or not.

    is_not: whether samples that fit are left out instead.
    field: `end`, an amount, `failed`, or "" for a text that the sample has to contain.
    """

    is_not: bool
    field: str
    sign: str
    value: str

    def holds(self, sample: ScoredSample) -> bool:
        if self.field == "end":
            fits = sample.ending in (CUT if self.value == TRUNCATED else (self.value,))
        elif self.field == "failed":
            fits = bool(sample.error)
        elif self.field:
            amount = AMOUNTS[self.field](sample)
            fits = amount is not None and _SIGNS[self.sign](amount, float(self.value))
        else:
            fits = any(self.value in text.casefold() for text in sample.searched)
        return fits is not self.is_not


class Choice(Struct, frozen=True):
    """Which samples are chosen, and in which order; by default all, as they were drawn.

    where: words as in HINT, each of which has to hold; one with `!` before it must not.
    sort: the amount by which the largest comes first; samples without a value come last.
    reverse: whether the smallest comes first instead.
    """

    where: str = ""
    sort: Order = "drawn"
    reverse: bool = False

    def test(self) -> Callable[[ScoredSample], bool]:
        """Return what tells whether a sample is chosen. Raises SpecError for an amount without a number."""
        words = list[_ChoiceWord]()
        for no, end, amount, sign, quoted, plain in _WORD.findall(self.where):
            value = quoted or plain
            if amount:
                try:
                    float(value)
                except ValueError:
                    hint = f"For example: {amount}{sign}1"
                    raise SpecError(f"{amount}{sign}{value[:40]} has no number", hint=hint) from None
                words.append(_ChoiceWord(bool(no), amount, sign, value))
            elif plain in ("failed", TRUNCATED) and not end:
                words.append(_ChoiceWord(bool(no), "end" if plain == TRUNCATED else plain, "", plain))
            elif end or value:
                words.append(_ChoiceWord(bool(no), end, "", value if end else value.casefold()))
        return lambda sample: all(word.holds(sample) for word in words)

    def options(self) -> str:
        """Write the options of `lorad samples` that ask for the same; "" for the default."""
        parts = [f"--where {shlex.quote(self.where)}"] if self.where.strip() else []
        parts += [f"--sort {self.sort}"] if self.sort != "drawn" else []
        return " ".join([*parts, *(["--reverse"] * self.reverse)])


def in_order(samples: Sequence[_O], choice: Choice) -> list[_O]:
    """Return all samples in the order of a choice."""
    if choice.sort == "drawn":
        return list(samples[::-1] if choice.reverse else samples)
    amount_of = AMOUNTS[choice.sort]
    sign = 1 if choice.reverse else -1
    return sorted(samples, key=lambda s: ((amount := amount_of(s)) is None, sign * (amount or 0.0)))


def ordered_by(text: str) -> Order:
    """Return the order that a text names. Raises SpecError."""
    for order in ORDERS:
        if order == text:
            return order
    raise SpecError(f"samples are not sorted by {text[:40]}", hint=f"Sort by one of: {', '.join(ORDERS)}.")
