"""The words by which runs are chosen: what a list shows, what a verb is about, what a program asks for."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from lorad.bounds import NAME_CHARACTERS, NAMES
from lorad.errors import SpecError
from lorad.states import EndReason, RunState
from lorad.text import seconds_of

_ME = "me"  # as an owner: whoever asks
STATES = (*map(str, RunState), *map(str, EndReason), "pausing")
_GLOB = frozenset("*?[")
_Seconds = Annotated[float, Meta(ge=0)]
_Word = Annotated[str, Meta(max_length=NAME_CHARACTERS)]
_Words = Annotated[list[_Word], Meta(max_length=100)]
_AGE = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")


class Selection(Struct, frozen=True, omit_defaults=True):
    """The runs that are meant are all that fit everything that is given; without anything, all of them.

    Texts are globs as a shell has them (`sweep-*`, `lr-[1-4]`); of several in one list one has to fit.

    names: names of the runs.
    state: states of a run (`running`, of those that are stopping `pausing`), and reasons for which runs ended
        (`failed`).
    owner: names of users; `me` is whoever asks.
    sweep: the sweeps that started them.
    tag: their tags, one of which has to fit.
    base: the models of their specs, whole or the last part of a path or hub id.
    older, newer: seconds since a run ended, or since it was made where it has not: at least, at most.
    """

    names: Annotated[list[_Word], Meta(max_length=NAMES)] = []
    state: _Words = []
    owner: _Words = []
    sweep: _Words = []
    tag: _Words = []
    base: _Words = []
    older: _Seconds | None = None
    newer: _Seconds | None = None

    @property
    def is_everything(self) -> bool:
        return self == Selection()

    def checked(self, me: str) -> "Selection":
        """Put the name of who asks in the place of `me`. Raises SpecError for a state that no run has."""
        for state in self.state:
            if state not in STATES:
                near = get_close_matches(state, STATES, 1)
                hint = f"Did you mean {near[0]}?" if near else f"States are {', '.join(STATES)}."
                raise SpecError(f"no run is ever {state!r}", hint=hint)
        return replace(self, owner=[me if owner == _ME else owner for owner in self.owner])


def is_glob(name: str) -> bool:
    return not _GLOB.isdisjoint(name)


def in_commas(values: Iterable[str] | None) -> list[str]:
    """Split values that were given several times, with commas, or both."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def selection(words: Mapping[str, Any]) -> Selection:
    """Make a selection of what was typed, by its name. Raises SpecError for an age that is none."""
    several = ("state", "owner", "sweep", "tag", "base")
    return Selection(
        names=[*(words.get("runs") or ())],
        older=seconds_in("--older", words.get("older")),
        newer=seconds_in("--newer", words.get("newer")),
        **{name: in_commas(words.get(name)) for name in several},
    )


def seconds_in(option: str, text: str | None) -> float | None:
    """Read `7d` or `1h30m`. Raises SpecError."""
    if text is None:
        return None
    if not _AGE.fullmatch(text):
        raise SpecError(f"{option} {text}: that is no age", hint="Write 90s, 30m, 12h, 7d, 2w or 1d12h.")
    return seconds_of(text)
