"""The language of the filter: words that must all be there, `field:word` that looks in one place, `!` for
not, quotes around what has blanks. Case does not matter; a word that is half typed narrows by as much as is
typed."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lorad.client.words import phase, why
from lorad.records.runs import Run

_FIELDS = ("state", "owner", "base", "pool", "alarm")
_WORD = re.compile(rf'(!?)(?:({"|".join(_FIELDS)}):)?(?:"([^"]*)"?|(\S*))')
HINT = "words, state:running, owner:ann, base:qwen, pool:qwen-1, alarm:kl, !word"


class _Word(NamedTuple):
    """A word of the filter; a field of "" looks everywhere."""

    is_not: bool
    field: str
    value: str


def words(text: str) -> list[_Word]:
    """Split what was typed into words; words without a value yet are left out."""
    parts = _WORD.findall(text.casefold())
    typed = (_Word(bool(no), field, quoted or plain) for no, field, quoted, plain in parts)
    return [word for word in typed if word.value]


def has(texts: Mapping[str, str], words: Iterable[_Word]) -> bool:
    """Return whether all the words are in the texts, and none that may not be."""
    return all((word.value in texts[word.field]) is not word.is_not for word in words)


def fields(run: Run, alarm: str = "") -> dict[str, str]:
    """Return the text that words are searched in, by field. alarm: the kinds of the run's alarms."""
    state = f"{run.state} {phase(run)} {run.reason or ''}"
    texts = {
        "state": f"{state} {state.replace('_', ' ')}",
        "owner": run.owner,
        "base": run.base,
        "pool": run.pool or "",
        "alarm": alarm,
    }
    plain = {field: text.casefold() for field, text in texts.items()}
    return plain | {"": f"{run.name} {why(run)}".casefold() + " ".join(("", *plain.values()))}
