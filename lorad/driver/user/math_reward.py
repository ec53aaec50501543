"""The builtin reward `math`. It runs as a file of the user's does, in an interpreter that has math-verify."""

import sys

from lorad.errors import LoradError

try:
    from math_verify import parse, verify  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError:
    raise LoradError(
        f"the reward math needs math-verify, which {sys.executable} does not have",
        hint=f"`{sys.executable} -m pip install math-verify` installs it (here: lorad[math]); or name an "
        "interpreter that has it in reward.python.",
    ) from None

_MARKS = ("$", "\\boxed", "\\(", "\\[")


def math(completion: str, answer: str) -> float:
    """Return 1 when the last expression of the completion equals the answer's, as mathematics.

    An answer is LaTeX or a number, with or without `$` or `\\boxed`; where it has `####`, it is what follows.
    """
    text = answer.rpartition("####")[2].strip()
    is_marked = any(mark in text for mark in _MARKS)  # `1 + x` without a mark would be read as 1
    gold = parse(text if is_marked else f"\\boxed{{{text}}}") or parse(text)
    if not gold:
        raise ValueError(f"the answer {answer!r} is no mathematics")
    return float(verify(gold, parse(completion)))
