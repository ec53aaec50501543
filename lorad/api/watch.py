"""Show a run in place while it works: in Jupyter its picture, in a terminal one line."""

import shutil
import sys
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

    In a notebook its picture replaces the one before, in a terminal its line; elsewhere each change is a line
    of its own.

    period: seconds between looks.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    is_notebook = "IPython.display" in sys.modules and hasattr(shell, "kernel")
    is_terminal = not is_notebook and sys.stderr.isatty()
    display: Any = sys.modules["IPython.display"].display(run, display_id=True) if is_notebook else None
    name = ""
    shown: tuple[str, int] | None = None
    try:
        while True:
            details = run.details
            name = details.name
            state = (details.state, details.step)
            if is_notebook:
                display.update(run)
            elif is_terminal:
                width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be cleared
                print(_CLEARED + line(details)[:width], end="", file=sys.stderr, flush=True)
            elif state != shown:
                print(line(details), file=sys.stderr, flush=True)
            shown = state
            if is_over(details):
                return
            rest(period)
    except KeyboardInterrupt:
        print(f"Not watched any more; {name or 'the run'} continues.", file=sys.stderr)
    finally:
        if is_terminal:
            print(file=sys.stderr)
