"""Which samples of a step are wanted, and in which order: the same words in requests to the daemon, in the
options of `lorad samples`, and in the samples tab.
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
TRUNCATED, CUT = "truncated", ("length", "tokens")  # the first is short for an end that is one of the others
HINT = "end:length  reward>0.5  length<=100  turns=2  failed  truncated  !end:done  words of the text"
_AMOUNTS = ("reward", "advantage", "length", "turns")
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_WORD = re.compile(rf'(!?)(?:(end):|({"|".join(_AMOUNTS)})({"|".join(_SIGNS)}))?(?:"([^"]*)"?|(\S*))')


class Amounts(Protocol):
    """A sample, as far as it is ordered by.

    size: tokens that the model sampled. turn_count: 1 of a completion.
    """

    @property
    def reward(self) -> float | None: ...
    @property
    def advantage(self) -> float | None: ...
    @property
    def size(self) -> int: ...
    @property
    def turn_count(self) -> int: ...


class Scored(Amounts, Protocol):
    """A sample, as far as it is chosen by.

    error: why its reward failed. ending: why it ended. searched: the texts that words are looked for in.
    """

    @property
    def error(self) -> str | None: ...
    @property
    def ending(self) -> str: ...
    @property
    def searched(self) -> Sequence[str]: ...


_S = TypeVar("_S", bound=Scored)
_O = TypeVar("_O", bound=Amounts)
_VALUES: Mapping[str, Callable[[Amounts], float | None]] = {
    "reward": lambda one: one.reward,
    "advantage": lambda one: one.advantage,
    "length": lambda one: one.size,
    "turns": lambda one: one.turn_count,
}


class _ChoiceWord(NamedTuple):
    """A word of `where`, which a sample fits or not.

    field: `end`, an amount, `failed`, or "" for a text that the sample has to contain.
    """

    is_not: bool
    field: str
    sign: str
    value: str

    def holds(self, sample: Scored) -> bool:
        if self.field == "end":
            fits = sample.ending in (CUT if self.value == TRUNCATED else (self.value,))
        elif self.field == "failed":
            fits = bool(sample.error)
        elif self.field:
            amount = _VALUES[self.field](sample)
            fits = amount is not None and _SIGNS[self.sign](amount, float(self.value))
        else:
            fits = any(self.value in text.casefold() for text in sample.searched)
        return fits is not self.is_not


class Choice(Struct, frozen=True):
    """The default is all of them as they were drawn.

    where: words as in HINT, all of which hold; `!` before a word: it does not.
    sort: the largest first; those without a value come last.
    reverse: the smallest first.
    """

    where: str = ""
    sort: Order = "drawn"
    reverse: bool = False

    def test(self) -> Callable[[Scored], bool]:
        """Return what says whether a sample is wanted. Raises SpecError."""
        words = _words(self.where)
        return lambda sample: all(word.holds(sample) for word in words)

    def options(self) -> str:
        """Return the options of `lorad samples` that ask for the same; "" for the default."""
        parts = [f"--where {shlex.quote(self.where)}"] if self.where.strip() else []
        parts += [f"--sort {self.sort}"] if self.sort != "drawn" else []
        return " ".join([*parts, *(["--reverse"] * self.reverse)])


def chosen(samples: Sequence[_S], choice: Choice) -> list[_S]:
    """Return the samples that are wanted, in order. Raises SpecError."""
    return in_order(list(filter(choice.test(), samples)), choice)


def in_order(samples: Sequence[_O], choice: Choice) -> list[_O]:
    """Return all of these in the order of a choice."""
    if choice.sort == "drawn":
        return list(samples[::-1] if choice.reverse else samples)
    value, sign = _VALUES[choice.sort], 1 if choice.reverse else -1
    return sorted(samples, key=lambda one: ((known := value(one)) is None, sign * (known or 0.0)))


def ordered_by(text: str) -> Order:
    """Raises SpecError where nothing is ordered by that."""
    for order in ORDERS:
        if order == text:
            return order
    raise SpecError(f"samples are not sorted by {text[:40]}", hint=f"Sort by one of: {', '.join(ORDERS)}.")


def _words(text: str) -> list[_ChoiceWord]:
    """Split what was typed into words. Raises SpecError."""
    words = list[_ChoiceWord]()
    for no, end, amount, sign, quoted, plain in _WORD.findall(text):
        value = quoted or plain
        if amount:
            words.append(_ChoiceWord(bool(no), amount, sign, _number(f"{amount}{sign}", value)))
        elif plain in ("failed", TRUNCATED) and not end:
            words.append(_ChoiceWord(bool(no), "end" if plain == TRUNCATED else plain, "", plain))
        elif end or value:
            words.append(_ChoiceWord(bool(no), end, "", value if end else value.casefold()))
    return words


def _number(before: str, value: str) -> str:
    try:
        float(value)
    except ValueError:
        raise SpecError(f"{before}{value[:40]} has no number", hint=f"For example: {before}1") from None
    return value
