"""Which runs a command line means: names, globs and filters as a `Selection`."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from lorad.cli.options import Bases, Newer, Older, Owners, Runs, States, Sweeps, Tags
from lorad.errors import SpecError
from lorad.selection import Selection, in_commas

_BY_NAME = Parameter.KEYWORD_ONLY
_WORDS: dict[str, Any] = {
    "runs": Runs,
    "state": States,
    "owner": Owners,
    "sweep": Sweeps,
    "tag": Tags,
    "base": Bases,
    "older": Older,
    "newer": Newer,
}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")


def chooses_runs(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command names, globs and filters in the place of its first parameter, a `Selection`."""

    @functools.wraps(command)
    def typed(**given: Any) -> None:
        words = {name: given.pop(name) for name in _WORDS}
        command(selection(words), **given)

    typed.__annotations__ = _WORDS | {
        name: kind for name, kind in inspect.get_annotations(command).items() if kind is not Selection
    }
    _, *others = inspect.signature(command).parameters.values()
    added = [Parameter(name, _BY_NAME, default=None, annotation=kind) for name, kind in _WORDS.items()]
    by_name = [parameter.replace(kind=_BY_NAME) for parameter in others]
    typed.__signature__ = inspect.Signature([*added, *by_name])  # type: ignore[attr-defined]
    return typed


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
    return sum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[smhdw]", text))
