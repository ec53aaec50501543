"""Find the runs that names, globs and filters mean, for commands and for the dashboard."""

from lorad.client.client import Client
from lorad.errors import NotFound, SpecError
from lorad.records.runs import Run
from lorad.selection import Selection, is_glob

_HINT = "`lorad list --all` shows every run."


def refuse_everything(selection: Selection) -> None:
    """Raise SpecError where a selection says nothing about which runs are meant."""
    if selection.is_everything:
        hint = "Names, globs ('sweep-*') or filters: --state failed --older 7d. '*' is every run."
        raise SpecError("no run was named", hint=hint)


def selected(client: Client, selection: Selection) -> list[Run]:
    """Find the runs that are meant. Raises NotFound for a name, or for globs, that no run has."""
    runs = client.select(selection)
    if selection == Selection(names=selection.names):
        existing = {run.name for run in runs}
        if missing := [name for name in selection.names if not is_glob(name) and name not in existing]:
            raise NotFound(f"no run named {', '.join(missing)}", hint=_HINT)
        if not runs:
            raise NotFound(f"no run is named like {', '.join(selection.names)}", hint=_HINT)
    return runs
