"""The versions of a run: the tree that they make, and what is done with them."""

import shlex
from typing import NamedTuple

from rich.text import Text
from textual.app import ComposeResult

from lorad.client.client import Client
from lorad.records.runs import RunDetails
from lorad.records.versions import Version
from lorad.text import one_line, size
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes, Pauses
from lorad.tui.run.version_rows import COLUMNS, FORK, ORIGIN, History, Painter, facts, forks, history
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.columns import Cells
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

# events that change what is shown
_KINDS = ("version", "alias", "pin", "unpin", "attempt", "rewind", "state", "serving")
_RUNS = 1000  # ended runs that are looked at for forks


class _VersionList(NamedTuple):
    """What is shown: the history, and the cells of each row by key, in order."""

    history: History
    rows: dict[str, Cells]


class VersionsTab(RunTab):
    TITLE = "versions"
    BINDINGS = bindings("version", "versions_tab")
    SCOPED_CSS = False  # it goes by the size of the screen
    DEFAULT_CSS = """
    VersionsTab { height: 1fr; }
    VersionsTab #versions-head { height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    VersionsTab Rows { height: 1fr; background: $background; }
    VersionsTab #version-facts { height: auto; max-height: 4; padding: 0 1; border-top: solid $primary; }
    .-short VersionsTab #version-facts, .-middle VersionsTab #version-facts { display: none; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._table = Rows(COLUMNS, id="versions-rows")
        self._pace = Pauses()
        self._is_stale = True
        self._forks: dict[str, int] = {}
        self._history = History([], 0, None, "", {})
        self._versions: dict[str, Version] = {}  # by key of their rows
        self._painter = Painter()  # the feed's thread's

    def compose(self) -> ComposeResult:
        yield Line(id="versions-head")
        yield self._table
        yield Line(id="version-facts")

    # -- what is shown ---------------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes, run: RunDetails) -> _VersionList | None:
        """Read all versions; where there are thousands, it takes a while and is done less often."""
        if changes.everything or any({"forked", "removed"} & kinds for kinds in changes.kinds.values()):
            self._forks = forks(client.list(all=True, limit=_RUNS), self.run_name)
            self._is_stale = True
        self._is_stale |= any(changes.touch(self.run_name, kind) for kind in _KINDS)
        if not self._is_stale or not (self._pace.is_due or changes.everything):
            return None
        with self._pace.asking():
            versions = client.adapters(self.run_name)
        self._is_stale = False
        seen = history(versions, run, dict(self._forks))
        return _VersionList(seen, self._painter.rows(seen))

    def show(self, data: _VersionList) -> None:
        is_first = not self._history.versions
        self._history = data.history
        self._versions = {str(version.version): version for version in data.history.versions}
        self._table.show(data.rows)
        if is_first:
            self.action_current()
        self.query_one("#versions-head", Line).say(self._head())

    def _head(self) -> Text:
        history = self._history
        versions = history.versions
        if not versions:
            return Text("No versions yet: the first one is published before the first step.")
        weight = sum(version.bytes for version in versions if version.path is not None)
        newest = f", the newest {len(versions)} here" if history.left_out else ""
        parts = [
            f"{len(versions) + history.left_out} versions{newest}",
            "none is current" if history.current is None else f"◉ current @{history.current}",
            f"{sum(version.pinned for version in versions)} pinned",
            f"{sum(version.loaded for version in versions)} loaded",
            f"{size(weight)} on disk",
            f"{len(history.forks)} fork{'s' * (len(history.forks) > 1)}" if history.forks else "",
            "● counts, ○ rewound",
            self._table.says,
        ]
        return Text(one_line(" · ".join(part for part in parts if part)))

    def on_rows_moved(self) -> None:
        self.query_one("#versions-head", Line).say(self._head())
        key = self._table.key
        run = self._run_of(key)
        about = Text(f"enter: to {one_line(run)}" if run else "")
        shown = facts(self._versions[key]) if key in self._versions else about
        self.query_one("#version-facts", Line).say(shown)

    # -- what keys act on ------------------------------------------------------------------------------------
    def targets(self, on: str) -> list[str]:
        chosen = self._table.chosen if on == "version" else []
        return [f"{self.run_name}@{key}" for key in chosen if key in self._versions]

    def preset(self, verb: str, target: str) -> dict[str, str]:
        """Suggest the alias that serves another version of this run."""
        names = [name for version in self._history.versions for name in version.aliases]
        return {"alias": names[0]} if verb == "swap" and len(names) == 1 else {}

    def command(self) -> str:
        return f"lorad adapters {shlex.quote(self.run_name)}"

    def _run_of(self, key: str | None) -> str:
        """Return the run that a row leads to, or ""."""
        if key == ORIGIN:
            name, at, number = self._history.origin.rpartition("@")
            return name if at and number.isdecimal() and "/" not in name else ""
        return key.removeprefix(FORK) if key is not None and key.startswith(FORK) else ""

    def on_rows_selected(self) -> None:
        if run := self._run_of(self._table.key):
            self.base.lorad.open_run(run)

    def action_current(self) -> None:
        self._table.go(str(self._history.current))
