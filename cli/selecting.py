"""Which runs a command line means: names, globs and filters as a `Selection`."""

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from lorad.cli.options import Bases, Newer, Older, Owners, Runs, States, Sweeps, Tags
from lorad.selection import Selection, selection

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


def chooses_runs(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command names, globs and filters in the place of its first parameter, a `Selection`."""

    @functools.wraps(command)
    def typed(**options: Any) -> None:
        words = {name: options.pop(name) for name in _WORDS}
        command(selection(words), **options)

    typed.__annotations__ = _WORDS | {
        name: kind for name, kind in inspect.get_annotations(command).items() if kind is not Selection
    }
    _, *others = inspect.signature(command).parameters.values()
    added = [Parameter(name, _BY_NAME, default=None, annotation=kind) for name, kind in _WORDS.items()]
    by_name = [parameter.replace(kind=_BY_NAME) for parameter in others]
    typed.__signature__ = inspect.Signature([*added, *by_name])  # type: ignore[attr-defined]
    return typed
