"""Asks the questions of the chat: a prompt for one or two versions, and how it should be answered."""

import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lorad.client.client import Client
from lorad.client.requests import Sampling
from lorad.client.shapes import Generated
from lorad.errors import LoradError, SpecError

MOST = 8  # answers that are waited for, dropped ones among them


@dataclass(frozen=True)
class Question:
    """target: an alias, run@12, or a run."""

    target: str
    prompt: str
    sampling: Sampling

    @property
    def command(self) -> str:
        how = self.sampling
        words = ["lorad", "generate", self.target, self.prompt]
        flags = ["--temperature", f"{how.temperature:g}"]
        flags += ["--max-new-tokens", str(how.max_new_tokens), "--seed", str(how.seed)]
        if self.target.startswith("-") or self.prompt.startswith("-"):
            words, flags = [*words[:2], *flags, "--", *words[2:]], []
        return shlex.join([*words, *flags])


@dataclass(frozen=True)
class Answer:
    """An answer, or the reason why there is none.

    version: the one that answered.
    wrong: why there is no answer.
    """

    version: str = ""
    text: str = ""
    tokens: int = 0
    finish: str = ""
    seconds: float = 0.0
    wrong: str = ""


def sampling_of(temperature: str, most: str, seed: str) -> Sampling:
    """Read the sampling parameters that were typed. Raises SpecError."""
    return Sampling(
        temperature=_typed(float, temperature or "0", 0, "temperature", "a number from 0 on"),
        max_new_tokens=_typed(int, most or "64", 1, "max tokens", "a whole number from 1 on"),
        seed=_typed(int, seed or "0", 0, "seed", "a whole number from 0 on"),
    )


def _typed(kind: Callable[[str], Any], text: str, least: int, what: str, wanted: str) -> Any:
    try:
        value = kind(text.strip())
    except ValueError:
        value = None
    if value is None or not least <= value < 2**63:  # nan is neither
        raise SpecError(f"{what}: {text!r} is not {wanted}.")
    return value


def ask(client: Client, question: Question, report: Callable[[Answer], object]) -> None:
    """Report the answer from a thread, which nobody waits for: leaving never waits for a pool."""

    def work() -> None:
        began = time.monotonic()
        try:
            report(_answer_of(client.generate(question.target, question.prompt, question.sampling), began))
        except LoradError as error:
            report(Answer(wrong=f"{error.message} {error.hint}".strip(), seconds=time.monotonic() - began))

    threading.Thread(target=work, name="chat", daemon=True).start()


def _answer_of(found: Generated, began: float) -> Answer:
    (completion, *_) = found.completions
    seconds, finish = time.monotonic() - began, completion.finish or ""
    return Answer(str(found.version), completion.text, len(completion.tokens), finish, seconds)
