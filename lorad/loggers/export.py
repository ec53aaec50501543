"""Writes a whole journal to a logger, also when its run ended long ago; repeating it changes nothing."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from lorad.box.paths import RunDir
from lorad.errors import NotFound, SpecError
from lorad.loggers.choose import LoggerChoice, make, refuse_unfit, type_of
from lorad.loggers.cursor import Cursor, CursorFile
from lorad.loggers.follow import Follower
from lorad.loggers.sink import logged_run


def chosen(name: str, place: str | None, settings: dict[str, Any]) -> LoggerChoice:
    """Choose a logger; `place` is a directory or an address. Raises SpecError, as the preflight does."""
    if place is not None:
        if not (key := type_of(name).place):
            raise SpecError(f"{name} takes no place", hint="Give its settings with --set KEY=VALUE.")
        if "dir" in key:
            place = os.path.abspath(Path(place).expanduser())
        settings = {**settings, key: place}
    refuse_unfit([{name: settings}])
    return LoggerChoice(name, settings)


def write_all(directory: RunDir, choice: LoggerChoice, files: Path) -> None:
    """Write a run's lineage from the beginning.

    Raises NotFound where nothing was journaled, Conflict while a process follows the run for the same place,
    and what the logger raises.
    """
    run = logged_run(directory, files)
    if run is None:
        raise NotFound(f"{directory.name} has measured nothing yet", hint="Ask again when it has begun.")
    with tempfile.TemporaryDirectory() as elsewhere:  # where the run's directory is the daemon's
        is_ours = directory.loggers.is_dir() or os.access(directory.root, os.W_OK)
        file = CursorFile((directory.loggers if is_ours else Path(elsewhere)) / f"{choice.id}.json")
        file.hold()
        file.save(Cursor())
        follower = Follower(directory.journal, partial(make, choice, run), file)
        try:
            follower.catch_up(is_over=True)
        finally:
            follower.drop()
