"""Draw points of a sweep from distributions, as in `trainer.lr=loguniform(1e-5,1e-3)`. Pure.

Each key has a generator of its own, from the seed and its name: another key beside it changes none of its
draws.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lorad.bounds import POINTS
from lorad.daemon.runs.grid import Axes, overridden_values, split
from lorad.errors import SpecError
from lorad.spec.text import key_of_override, refuse_long, refuse_many

_CALL = re.compile(r"(uniform|loguniform|int|logint|choice)\((.*)\)", re.DOTALL)
_DIGITS = 4  # of a number that is drawn
_TRIES = 100  # for each point, to find one that was not drawn yet
_HINT = "There are uniform(a,b), loguniform(a,b), int(a,b), logint(a,b) and choice(a,b,…)."

_Draw = Callable[[random.Random], str]


class _Distribution(NamedTuple):
    """The values that a key may have.

    text: the distribution as it was written.
    draw: draws one of them, as text.
    values: all of them, where they are listed.
    """

    text: str
    draw: _Draw
    values: Sequence[str] = ()


def distributions_of(overrides: Sequence[str]) -> tuple[dict[str, _Distribution], list[str]]:
    """Find the keys that are drawn, in order, and the overrides with one value. Several values separated by
    commas are a choice. Raises SpecError.
    """
    refuse_many(overrides)
    distributions: dict[str, _Distribution] = {}
    rest = []
    for text in overrides:
        refuse_long(text)
        first, _, value = text.partition("=")
        call = _CALL.fullmatch(value.strip())
        if call is None:
            key, values = overridden_values(text)
            distribution = _choice(value, values) if len(values) > 1 else None
        else:
            key = key_of_override(f"{first}=0")
            arguments = [part for part in split(call[2]) if part]
            if call[1] == "choice":
                distribution = _choice(value, overridden_values(f"{first}={','.join(arguments)}")[1])
            else:
                distribution = _Distribution(value.strip(), _number(call[1], arguments, text))
        if distribution is None:
            rest.append(text)
        elif key in distributions:
            raise SpecError(f"override {text}: {key} is given twice", hint="Give it once.")
        elif key == "name":
            raise SpecError("override name=…: runs of a sweep get their names from it", hint="Use --name.")
        else:
            distributions[key] = distribution
    return distributions, rest


def axes_of(overrides: Sequence[str]) -> tuple[Axes, list[str]]:
    """Find the values of each key of a grid, in order, and the overrides with one.

    Raises SpecError where there is nothing to sweep, or values cannot be listed.
    """
    distributions, rest = distributions_of(overrides)
    if not distributions:
        hint = "Separate them by commas, as in trainer.lr=1e-4,3e-4; `lorad run` starts a single run."
        raise SpecError("no override has several values, so there is nothing to sweep", hint=hint)
    for key, distribution in distributions.items():
        if not distribution.values:
            hint = "Draw points with --random 12, or separate values by commas."
            raise SpecError(f"{key}={distribution.text} has no list of values, which a grid needs", hint=hint)
    return {key: [*distribution.values] for key, distribution in distributions.items()}, rest


def draw_points(distributions: dict[str, _Distribution], count: int, seed: int) -> list[list[str]]:
    """Draw the overrides of so many different points; equal arguments give equal points. Raises SpecError."""
    if not distributions:
        raise SpecError("no key is drawn, so all points would be the same", hint=_HINT)
    if not 0 < count <= POINTS:
        raise SpecError(f"--random {count}: not 1 to {POINTS} points", hint="Sweep twice for more.")
    generators = {key: random.Random(f"{seed}/{key}") for key in distributions}
    points: dict[tuple[str, ...], None] = {}
    for _ in range(_TRIES * count):
        values = (f"{key}={spread.draw(generators[key])}" for key, spread in distributions.items())
        points.setdefault(tuple(values))
        if len(points) == count:
            return [[*point] for point in points]
    problem = f"--random {count}: there are hardly more than {len(points)} different points"
    raise SpecError(problem, hint="Ask for fewer, or leave --random out for all of a grid.")


def _choice(text: str, values: Sequence[str]) -> _Distribution:
    return _Distribution(text.strip(), lambda generator: generator.choice(values), tuple(values))


def _number(kind: str, arguments: Sequence[str], override: str) -> _Draw:
    """Make what draws a number between two bounds. Raises SpecError for arguments that are no such bounds."""
    try:
        low, high = (float(part) for part in arguments)
    except ValueError:
        raise SpecError(f"override {override}: {kind} takes two numbers", hint=_HINT) from None
    is_log = kind.startswith("log")
    is_int = kind.endswith("int")
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (is_log and low <= 0):
        least = " above 0" * is_log
        raise SpecError(f"override {override}: not a lower and a higher number{least}", hint=_HINT)
    if is_int and not (low.is_integer() and high.is_integer()):
        raise SpecError(f"override {override}: {kind} takes two whole numbers", hint=_HINT)

    def draw(generator: random.Random) -> str:
        if is_int and not is_log:
            return str(generator.randint(int(low), int(high)))
        if is_log:
            value = math.exp(generator.uniform(math.log(low), math.log(high + is_int)))
        else:
            value = generator.uniform(low, high)
        if is_int:
            return str(min(int(value), int(high)))
        rounded = float(f"{value:.{_DIGITS}g}")
        return repr(min(max(rounded, low), high))

    return draw


def listed_points(points: Sequence[Sequence[str]]) -> tuple[Axes, list[list[str]]]:
    """Check points of a list, the overrides of each, and find the values of each key. Raises SpecError."""
    if not 0 < len(points) <= POINTS:
        raise SpecError(f"{len(points)} points are not 1 to {POINTS}", hint="Sweep twice for more.")
    axes: Axes = {}
    for number, point in enumerate(points, 1):
        keys = {key_of_override(text) for text in point}
        if len(keys) < len(point) or "name" in keys:
            hint = "Runs get their names from --name."
            raise SpecError(f"point {number}: a key is there twice, or it is `name`", hint=hint)
        for text in point:
            values = axes.setdefault(key_of_override(text), [])
            if (value := text.partition("=")[2]) not in values:
                values.append(value)
    return axes, [[*point] for point in points]
