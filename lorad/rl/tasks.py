"""The builtin tasks: endless, checkable problems that need no data file."""

import random
import string
import zlib
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from lorad.errors import SpecError

Split = Literal["train", "validation", "test"]

_BUCKETS = 16


class Problem(msgspec.Struct, frozen=True):
    """One question with its only right answer; `id` names it for ever, e.g. `sort/train/0/17`."""

    id: str
    prompt: str
    answer: str


class _Task(msgspec.Struct, frozen=True):
    """A family of problems `<letter>:<word>=`.

    alphabet: The characters of the word.
    lengths: The least and the most characters of the word.
    env: The environment that its rows are for, without which there is no answer to the prompt.
    """

    letter: str
    alphabet: str
    solve: Callable[[str, random.Random], str]
    lengths: tuple[int, int] = (4, 8)
    env: str | None = None


TASKS: dict[str, _Task] = {
    "sort": _Task("S", string.digits, lambda word, _: "".join(sorted(word))),
    "reverse": _Task("R", string.ascii_lowercase, lambda word, _: word[::-1]),
    "lookup": _Task(  # what a store holds under a key, which does not show it
        "R",
        string.ascii_lowercase,
        lambda _, chance: "".join(chance.choices(string.digits, k=chance.randint(3, 4))),
        lengths=(4, 5),
        env="lookup",
    ),
}


def split_of(prompt: str) -> Split:
    """Return the split of a prompt: 1/16 are test (held out), 1/16 validation (for tuning), others train."""
    bucket = zlib.crc32(prompt.encode()) % _BUCKETS
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def problem(task: str, split: Split, seed: int, index: int) -> Problem:
    """Return the problem at `index` of an endless sequence; equal arguments give equal problems, on any
    machine.

    Every problem has its own random stream, so any index costs the same and none depends on another. No
    prompt is in two splits; within one split prompts may repeat.

    Raises:
        SpecError: there is no such task or split.
    """
    if task not in TASKS:
        raise SpecError(
            f"there is no builtin task {task!r}", hint=f"choose one of: {', '.join(sorted(TASKS))}"
        )
    if split not in get_args(Split):
        raise SpecError(
            f"task {task!r} has no split {split!r}", hint=f"choose one of: {', '.join(get_args(Split))}"
        )
    kind = TASKS[task]
    name = f"{task}/{split}/{seed}/{index}"
    rng = random.Random(name)
    while True:
        word = "".join(rng.choices(kind.alphabet, k=rng.randint(*kind.lengths)))
        prompt = f"{kind.letter}:{word}="
        if split_of(prompt) == split:
            return Problem(id=name, prompt=prompt, answer=kind.solve(word, rng))
