"""Conditions on figures of a run, for which one can wait: `eval>0.9`, `step>=20`, `loss<0.1`."""

import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lorad.errors import SpecError

_COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([A-Za-z_][\w/@.\-]*?)\s*(>=|<=|==|>|<)\s*(\S+)\s*")


class Condition(NamedTuple):
    """A figure of a step or of an evaluation, compared with a number.

    metric: `step`, a metric of steps, or a figure of evaluations: eval, eval/NAME, nll, accuracy.
    """

    metric: str
    comparison: str
    number: float

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.number:g}"

    def holds(self, figures: Mapping[str, float | None]) -> bool:
        """Whether the figures have the metric, and it fulfils the condition."""
        value = figures.get(self.metric)
        return value is not None and _COMPARED[self.comparison](value, self.number)


def condition(text: str) -> Condition:
    """Read a condition. Raises SpecError."""
    match = _FORM.fullmatch(text)
    try:
        if match is not None:
            return Condition(match[1], match[2], float(match[3]))
    except ValueError:
        pass
    hint = "Write METRIC, one of > >= < <= ==, and a number: eval>0.9, step>=20, loss<0.1."
    raise SpecError(f"{text!r} is no condition", hint=hint)
