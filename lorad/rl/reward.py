"""Builtin rewards, and what a reward function is given and may return."""

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from msgspec import Struct

from lorad.errors import SpecError


class RewardInput(Struct, frozen=True, omit_defaults=True):
    """One finished sample.

    completion: its text without special tokens.
    finish: "stop" or "length".
    completion_ids: its tokens; only for a function that asks for them.
    prompt_value: the prompt as the row has it, a text or messages; only for a function of lists.
    answer_value: the answer as the row has it; only for a user's function.
    Both are None where the row has nothing else than `prompt` and `answer`.

    A reward function may ask by name for these, which win, and for the columns of the row.
    """

    prompt: str
    completion: str
    answer: str
    finish: str
    row: dict[str, Any] = {}
    completion_ids: list[int] = []
    prompt_value: str | list[dict[str, Any]] | None = None
    answer_value: Any = None


OF_TRL = {"trainer_state", "log_extra", "log_metric", "environments"}  # what only its trainer gives
_OF_VERL = {"solution_str": "completion", "ground_truth": "answer"}
SAMPLE_KEYS = {"prompt", "completion", "answer", "finish", "completion_ids"}
_Reward = Callable[[RewardInput], float]
ANSWERED = ("exact_match", "gsm8k")  # these need an answer in every row
PACKAGED = {  # files of lorad's that are run as one of the user's is: they need packages
    "judge": "judge_reward.py:judge",
    "math": "math_reward.py:math",
    "reasoning_gym": "reasoning_gym_reward.py:score",
}
BUILTIN = (*ANSWERED, "regex", *PACKAGED)
_MARK = "####"
_NUMBER = re.compile(r"[-+]?\$?\s*[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def lacking(
    name: str,
    required: Iterable[str],
    row: Mapping[str, Any],
    *,
    has_answers: bool,
    has_prompts: bool = True,
) -> list[str]:
    """Return what a reward asks for and the data do not have. row: the first one."""
    has = {"answer": has_answers, "prompt": has_prompts}
    there = SAMPLE_KEYS.union(row) - {key for key, is_there in has.items() if not is_there}
    return sorted({*required, *(["answer"] if name in ANSWERED else [])} - there)


def renamed(missing: Iterable[str]) -> str:
    """Say how lorad calls what a reward function asks for by verl's names; "" where it asks for none."""
    names = [f"{name} is {_OF_VERL[name]} here" for name in missing if name in _OF_VERL]
    return f"verl's {' and '.join(sorted(names, reverse=True))}: rename the parameters. " if names else ""


def builtin(name: str, pattern: str | None = None) -> _Reward:
    """Return the builtin reward `name`. Raises SpecError when there is none or its pattern is missing or does
    not compile.
    """
    if name == "regex":
        return _regex(pattern)
    if name not in BUILTIN:
        raise SpecError(
            f"there is no builtin {name!r}",
            key="reward",
            hint=f"Name one of {', '.join(BUILTIN)}, or path/to/file.py:function.",
        )
    return _exact_match if name == "exact_match" else gsm8k


def _exact_match(sample: RewardInput) -> float:
    """1 when the model stopped by itself and wrote the answer, white space around it aside."""
    return float(sample.finish == "stop" and sample.completion.strip() == sample.answer.strip())


def gsm8k(sample: RewardInput) -> float:
    """1 when the number behind the last `####` of the completion is the answer's (Cobbe et al., 2021).

    An answer without `####` is the number itself. `$`, thousands commas and a final full stop mean nothing.
    """
    wanted = _final_number(sample.answer) if _MARK in sample.answer else _number(sample.answer)
    return float(wanted is not None and _final_number(sample.completion) == wanted)


def _final_number(text: str) -> Decimal | None:
    """Return the number right behind the last `####`, if there is one."""
    _, mark, rest = text.rpartition(_MARK)
    return _number(rest) if mark else None


def _regex(pattern: str | None) -> _Reward:
    """1 when `pattern` is found in the completion; a group named `answer` must be the row's
    answer besides.
    """
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
        found = compiled.search(sample.completion)
        if found is None or "answer" not in compiled.groupindex:
            return float(found is not None)
        return float(found["answer"] is not None and found["answer"].strip() == sample.answer.strip())

    return regex


def _number(text: str) -> Decimal | None:
    found = _NUMBER.match(text.lstrip())
    if found is None:
        return None
    try:
        return Decimal(re.sub(r"[$,\s]", "", found.group()))
    except InvalidOperation:
        return None
