"""Show a run in place while it works: in Jupyter its picture, in a terminal one line."""

import shutil
import sys
from collections.abc import Callable
from typing import Any, Protocol

from lorad.api.connection import rest
from lorad.api.picture import line
from lorad.api.waiting import is_over
from lorad.records.runs import RunDetails

_CLEARED = "\r\x1b[2K"


class Shown(Protocol):
    """A run that can be asked how it is, and that Jupyter can display."""

    @property
    def details(self) -> RunDetails: ...


def watch(run: Shown, period: float) -> None:
    """Show a run again and again until it is over. An interrupt ends only the watching.

    period: seconds between looks.
    """
    name = ""
    try:
        show: Callable[[RunDetails], None] = _line_in_place if sys.stderr.isatty() else _Lines().show
        if _is_notebook():  # what it shows replaces what it showed before
            display: Any = sys.modules["IPython.display"]
            shown = display.display(run, display_id=True)

            def show(_: RunDetails) -> None:
                shown.update(run)

        while True:
            details = run.details
            name = details.name
            show(details)
            if is_over(details):
                return
            rest(period)
    except KeyboardInterrupt:
        print(f"Not watched any more; {name or 'the run'} continues.", file=sys.stderr)
    finally:
        if not _is_notebook() and sys.stderr.isatty():
            print(file=sys.stderr)


def _is_notebook() -> bool:
    """Whether an IPython kernel runs this code: it has imported what displays."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPython.display" in sys.modules and hasattr(shell, "kernel")


def _line_in_place(run: RunDetails) -> None:
    width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be cleared
    print(_CLEARED + line(run)[:width], end="", file=sys.stderr, flush=True)


class _Lines:
    """A line for each change, for logs and pipes."""

    def __init__(self) -> None:
        self._said: tuple[str, int] | None = None

    def show(self, run: RunDetails) -> None:
        now = (run.state, run.step)
        if now != self._said:
            self._said = now
            print(line(run), file=sys.stderr, flush=True)
