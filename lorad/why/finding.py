"""Define what a rule says of a run, and what all rules together say."""

from typing import Literal

from msgspec import Struct

_Figures = dict[str, float | int | str]


class Finding(Struct, frozen=True):
    """Says what keeps a run from learning, or from being judged.

    name: a word to look up in docs/why.md.
    severity: `cause` explains by itself that a run does not learn; `look` may be meant.
    says: a sentence with the figures.
    figures: what the sentence rests on, by name.
    next: one command, or one key of the spec, to try.
    """

    name: str
    severity: Literal["cause", "look"]
    says: str
    figures: _Figures
    next: str


class Why(Struct, frozen=True):
    """Answers `lorad why`.

    findings: the most likely cause first.
    says: in a sentence, how the run does.
    looked: what was looked at, in a sentence.
    """

    run: str
    findings: list[Finding]
    says: str
    looked: str
