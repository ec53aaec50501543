"""The runs that names, globs and filters mean, the same for commands and the dashboard."""

from collections.abc import Sequence

from lorad.client.client import Client
from lorad.errors import NotFound, SpecError
from lorad.records.runs import Run
from lorad.selection import Selection, is_glob

_HINT = "`lorad list --all` shows every run."


def refuse_everything(selection: Selection) -> None:
    """Raises SpecError where nothing was said about which runs are meant."""
    if selection.is_everything:
        hint = "Names, globs ('sweep-*') or filters: --state failed --older 7d. '*' is every run."
        raise SpecError("no run was named", hint=hint)


def selected(client: Client, selection: Selection) -> list[Run]:
    """Find the runs that are meant. Raises NotFound for a name, or for globs, that no run has."""
    runs = client.select(selection)
    if selection == Selection(names=selection.names):
        _refuse_missing(selection.names, {run.name for run in runs})
    return runs


def _refuse_missing(asked: Sequence[str], found: set[str]) -> None:
    missing = [name for name in asked if not is_glob(name) and name not in found]
    if missing:
        raise NotFound(f"no run named {', '.join(missing)}", hint=_HINT)
    if not found:
        raise NotFound(f"no run is named like {', '.join(asked)}", hint=_HINT)
