"""Builtin rewards, and what a reward function is given and may return."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from msgspec import Struct

from lorad.errors import SpecError


class RewardInput(Struct, frozen=True, omit_defaults=True):
    """One finished sample.

    A reward function may ask by name for these fields, which win, and for the columns of the row.

    completion: The text of the completion without special tokens.
    finish: "stop" or "length".
    completion_ids: The tokens of the completion; only for a function that asks for them.
    raw_completion: Its text with special tokens and the stop string; only for a function that asks for
        it.
    prompt_value: The prompt as the row has it, a text or messages; only for a function of lists. None
        where the row has nothing else than `prompt`.
    answer_value: The answer as the row has it; only for a user's function. None where the row has nothing
        else than `answer`.
    """

    prompt: str
    completion: str
    answer: str
    finish: str
    row: dict[str, Any] = {}
    completion_ids: list[int] = []
    raw_completion: str = ""
    prompt_value: str | list[dict[str, Any]] | None = None
    answer_value: Any = None


OF_TRL = {"trainer_state", "log_extra", "log_metric", "environments"}  # what only its trainer gives
_OF_VERL = {"solution_str": "completion", "ground_truth": "answer"}
SAMPLE_KEYS = {"prompt", "completion", "answer", "finish", "completion_ids", "raw_completion"}
HIDING = {"finish", "completion_ids", "raw_completion", "raw_completions", "groups"}  # columns of these names
_Reward = Callable[[RewardInput], float]
ANSWERED = ("exact_match", "gsm8k")  # these need an answer in every row
PACKAGED = {  # files of lorad's that are run as one of the user's is: they need packages
    "judge": "judge_reward.py:judge",
    "math": "math_reward.py:math",
    "reasoning_gym": "reasoning_gym_reward.py:score",
}
BUILTIN = (*ANSWERED, "regex", *PACKAGED)
_MARK = "####"
_ZEROS = re.compile(r"\A([+-]?\d+)\.0+\Z")  # behind a whole number
_LONGEST = 100  # characters of a number
_KEYBOARD: dict[int, int | str] = {
    **{0xFF01 + place: 0x21 + place for place in range(94)},  # of full width
    **dict.fromkeys(map(ord, "\u2212\u2013\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\xa0\u2009\u202f\u3000'\u2019"), " "),
    ord("\u2044"): "/",
    ord("\xd7"): "*",
}
_OF_LATEX = {r"\times": "*", r"\cdot": "*", "{,}": ",", r"\,": " "}
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
# Atomic groups, and no possessive repeats of groups: before 3.11.5 Python goes on behind what the last turn
# read in vain (python/cpython#106052).
_OPENS = r"(?>(?:[\s*_`\"({\[$\u20ac\xa3\xa5\u20b9]|\\boxed|\\[$(\[])*)"
_NUMBER = re.compile(
    rf"{_OPENS}(?P<sign>[+-]?){_OPENS}(?:"
    r"(?:(?P<whole>\d++) ++)?(?P<top>\d++) *+/ *+(?P<bottom>\d++)"
    r"|(?P<digits>[1-9]\d{0,2}(?>(?: \d{3})+)(?:[.,]\d++)?(?!\d)|\.?\d++(?>(?:[.,]\d++)*))"
    r"(?:(?:[eE]| *+\* *+10\^\{?)(?P<power>[+-]?\d{1,3}))?)"
)
_GOES_ON = re.compile(r"[^\s,;]*\d|\s*[-+*/^:=\xf7~]+[\s$]*\d")  # 3:30, 5-6, 20 - 2
_GROUPED = {  # what groups thousands in digits of each form
    re.compile(r"[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}(?:\.\d+)?"): ",",
    re.compile(r"[1-9]\d{0,2}(?: \d{3})+(?:[.,]\d+)?"): " ",
    re.compile(r"[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})"): ".",
    re.compile(r"\d*\.?\d+|\d+,\d+"): "",
}
_OF_UNIT = re.compile(r"(?<=[A-Za-z])\^?\{?[23](?!\d)")  # the power of cm2


def lacking(
    name: str, required: Iterable[str], row: Mapping[str, Any], *, has_answers: bool, has_prompts: bool = True
) -> list[str]:
    """Return what a reward asks for and the data, which begin with this row, do not have."""
    has = {"answer": has_answers, "prompt": has_prompts}
    available = SAMPLE_KEYS.union(row) - {key for key, is_there in has.items() if not is_there}
    return sorted({*required, *(["answer"] if name in ANSWERED else [])} - available)


def renamed(missing: Iterable[str]) -> str:
    """Say how lorad calls what a reward function asks for by verl's names; "" where it asks for none."""
    names = [f"{name} is {_OF_VERL[name]} here" for name in missing if name in _OF_VERL]
    return f"verl's {' and '.join(sorted(names, reverse=True))}: rename the parameters. " if names else ""


def compares(name: str, pattern: str | None) -> bool:
    """Return whether a builtin reward compares the text of a completion with the answer."""
    return name in ANSWERED or (name == "regex" and "(?P<answer>" in (pattern or ""))


def builtin(name: str, pattern: str | None = None) -> _Reward:
    """Return the builtin reward `name`. Raises SpecError without it, and for its pattern if that is wrong."""
    if name == "regex":
        if pattern is None:
            raise SpecError(
                "missing for regex", key="reward.pattern", hint="Write reward: {name: regex, pattern: '…'}."
            )
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise SpecError(
                f"{pattern!r} does not compile: {error}", key="reward.pattern", hint="See Python's re."
            ) from error

        def regex(sample: RewardInput) -> float:
            """Give 1 where the pattern is in the completion; a group `answer` must be the row's answer."""
            match = compiled.search(sample.completion)
            if match is None or "answer" not in compiled.groupindex:
                return float(match is not None)
            return float(match["answer"] is not None and _is_same(match["answer"], sample.answer))

        return regex
    if name not in BUILTIN:
        hint = f"Name one of {', '.join(BUILTIN)}, or path/to/file.py:function."
        raise SpecError(f"there is no builtin {name!r}", key="reward", hint=hint)
    return _exact_match if name == "exact_match" else gsm8k


def _exact_match(sample: RewardInput) -> float:
    """Return 1 when the model stopped by itself and wrote the answer, see `_is_same`."""
    return float(sample.finish == "stop" and _is_same(sample.completion, sample.answer))


def _is_same(*texts: str) -> bool:
    """Compare texts without outer white space, forms of line ends and letters, and `.0` of whole numbers."""
    composed = (unicodedata.normalize("NFC", text.replace("\r\n", "\n")).strip() for text in texts)
    return len({_ZEROS.sub(r"\1", text) for text in composed}) == 1


def gsm8k(sample: RewardInput) -> float:
    """Return 1 when the number behind the last `####` of the completion is the answer's (Cobbe et al., 2021).

    An answer without `####` is the number itself.
    """
    expected = number_in(sample.answer.rpartition(_MARK)[2])
    _, mark, final = sample.completion.rpartition(_MARK)
    return float(bool(mark) and expected is not None and number_in(final) == expected)


def number_in(text: str) -> Fraction | None:
    """Return the number that the first line of a text begins with; None where it begins with none.

    A currency and marks of Markdown and LaTeX may stand beside it. None, too, where the number goes on, as in
    3:30, 5-6 and 20 - 2.
    """
    line = text.strip().partition("\n")[0]
    for written, plain in _OF_LATEX.items():
        line = line.replace(written, plain)
    line = _FRAC.sub(r" \1/\2", line.translate(_KEYBOARD))
    match = _NUMBER.match(line)
    if match is None or len(match[0]) > _LONGEST:
        return None
    behind = line[match.end() :]
    is_raised = behind[:1] == "^" or unicodedata.category(behind[:1] or " ") == "No"
    if is_raised or _GOES_ON.match(_OF_UNIT.sub("", behind)):
        return None
    if match["top"]:
        if not int(match["bottom"]):
            return None
        value = int(match["whole"] or 0) + Fraction(match["top"]) / int(match["bottom"])
    else:
        forms = (form for form in _GROUPED if form.fullmatch(match["digits"]))
        if (form := next(forms, None)) is None:  # signs between digits that group nothing
            return None
        digits = match["digits"].replace(_GROUPED[form], "").replace(",", ".")
        value = Fraction(digits) * Fraction(10) ** int(match["power"] or 0)
    return -value if match["sign"] == "-" else value
