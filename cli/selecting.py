"""Which runs a command line means: names, globs and filters as a `Selection`."""

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

import typer

from lorad.cli import candidates
from lorad.selection import Selection, selection

_BY_NAME = Parameter.KEYWORD_ONLY
_FILTERS = {
    "state": ("Of these states (running) or with these ends (failed); with commas.", candidates.states),
    "owner": ("Of these users; me.", candidates.owners),
    "sweep": ("Of these sweeps.", candidates.sweeps),
    "tag": ("With one of these tags.", candidates.tags),
    "base": ("On these base models: whole, or the last part of the path.", candidates.run_bases),
}
_SEVERAL = list[str] | None
_NAMES = "Names, or globs in quotes: 'sweep-*'."
_AGO = "Ended (or made, where it has not) at {} so long ago: {}."
_WORDS: dict[str, Any] = {
    "runs": Annotated[
        _SEVERAL, typer.Argument(metavar="[RUN]…", help=_NAMES, autocompletion=candidates.runs)
    ],
    **{
        name: Annotated[_SEVERAL, typer.Option(f"--{name}", help=about, autocompletion=offer)]
        for name, (about, offer) in _FILTERS.items()
    },
    "older": Annotated[str | None, typer.Option(help=_AGO.format("least", "7d"))],
    "newer": Annotated[str | None, typer.Option(help=_AGO.format("most", "12h"))],
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
