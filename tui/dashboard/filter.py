"""The language of the filter: words that must all be there, `field:word` that looks in one place, `!` for
not, quotes around what has blanks. Case is nothing to it; what is not whole yet narrows by as much as there
is."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lorad.client.words import phase, why
from lorad.records.runs import Run

_FIELDS = ("state", "owner", "base", "pool", "alarm")
_WORD = re.compile(rf'(!?)(?:({"|".join(_FIELDS)}):)?(?:"([^"]*)"?|(\S*))')
HINT = "words, state:running, owner:ann, base:qwen, pool:qwen-1, alarm:kl, !word"


class _Word(NamedTuple):
    """field: "" looks everywhere."""

    is_not: bool
    field: str
    value: str


def words(text: str) -> list[_Word]:
    """Split what was typed into words; words without a value yet are left out."""
    found = (
        _Word(bool(no), field, quoted or plain) for no, field, quoted, plain in _WORD.findall(text.casefold())
    )
    return [word for word in found if word.value]


def wanted(run: Run, text: str, alarm: str = "") -> bool:
    """See `has` and `fields`."""
    return has(fields(run, alarm), words(text))


def has(sought: Mapping[str, str], wanted: Iterable[_Word]) -> bool:
    """Whether all the words are there, and none that may not be."""
    return all((word.value in sought[word.field]) is not word.is_not for word in wanted)


def fields(run: Run, alarm: str = "") -> dict[str, str]:
    """Return the text that words are searched in, by field. alarm: the kinds of the run's alarms."""
    state = f"{run.state} {phase(run)} {run.reason or ''}"
    found = {
        "state": f"{state} {state.replace('_', ' ')}",
        "owner": run.owner,
        "base": run.base,
        "pool": run.pool or "",
        "alarm": alarm,
    }
    plain = {field: text.casefold() for field, text in found.items()}
    return plain | {"": f"{run.name} {why(run)}".casefold() + " ".join(("", *plain.values()))}
