"""Shows what is served under which name and how much it is used, and has a chat that compares versions."""

import shlex
from collections.abc import Iterable

from rich.text import Text
from textual.containers import VerticalScroll
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from lorad.client.client import Client
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes
from lorad.tui.screens.base import TableScreen
from lorad.tui.serving import alias_rows
from lorad.tui.serving.chat import ChatPanel
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

_MOVES = 100  # that are shown
_SETTLED = 0.15  # seconds that the cursor rests before the moves of an alias are read
_NONE = (
    "Nothing is served under a name yet.\n\n"
    "Press w on a version of a run, or in a shell:\n"
    "  lorad swap ALIAS RUN@N\n"
    "  lorad serve MODEL --adapter NAME=DIR\n\n"
    "c opens a chat with any version, aliased or not."
)


class Serving(TableScreen):
    BINDINGS = bindings("alias", "serving", "back")
    DEFAULT_CSS = """
    Serving #aliases { height: 1fr; min-height: 3; background: $background; }
    Serving #none { display: none; height: 1fr; padding: 1 2; }
    Serving.-none #none { display: block; }
    Serving.-none #aliases, Serving.-none #about, Serving.-none #moves { display: none; }
    Serving #about { height: auto; max-height: 4; width: 100%; padding: 0 1; }
    Serving #moves { height: 7; border: round $primary; border-title-style: bold; padding: 0 1; }
    Serving #log-of-moves { height: auto; width: 100%; }
    Serving.-high #moves { height: 12; }
    Serving.-short #moves, Serving.-short #about, Serving.-middle #moves { display: none; }
    Serving ChatPanel { display: none; }
    Serving.-chat ChatPanel { display: block; height: 2fr; }
    Serving.-chat #moves { display: none; }
    Serving.-chat.-tall #about { max-height: 1; }
    Serving.-chat.-short #aliases, Serving.-chat.-short #none { display: none; }
    Serving.-chat.-middle #about, Serving.-chat.-tall #none { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._reader = alias_rows.AliasReader()
        self._data: alias_rows.AliasData | None = None
        self._settling: Timer | None = None
        self.table = Rows(alias_rows.COLUMNS, id="aliases")
        self.chat = ChatPanel()

    def body(self) -> Iterable[Widget]:
        yield self.table
        yield Static(_NONE, id="none", markup=False)
        yield Line(id="about")
        with VerticalScroll(id="moves"):
            yield Line(id="log-of-moves")
        yield self.chat

    def on_mount(self) -> None:
        self.query_one("#moves").border_title = "Moves"

    # -- what is shown ---------------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes) -> alias_rows.AliasData | None:
        return self._reader.read(client, changes)

    def show(self, data: alias_rows.AliasData) -> None:
        self._data = data
        self.table.show_rows({row.alias: alias_rows.alias_row(row, data) for row in data.aliases})
        self.set_class(not data.aliases, "-none")
        self.say_title(alias_rows.title(data))
        names = (
            {row.alias for row in data.aliases}
            | {alias_rows.version_of(row) for row in data.aliases}
            | set(data.pools)
        )
        self.chat.suggest(sorted(names))
        self.tell()

    def tell(self) -> None:
        """Describe the alias under the cursor, with its moves when they are there."""
        data = self._data
        alias = self.table.key
        row = data.of(alias) if data else None
        about = moves = Text()
        if data is not None and row is not None:
            about = alias_rows.details(row, data)
            is_read = data.alias == alias
            moves = alias_rows.moves_text(data.moves[:_MOVES]) if is_read else Text("…", style="dim")
        self.query_one("#about", Line).say(about)
        self.query_one("#log-of-moves", Line).say(moves)

    def on_rows_moved(self) -> None:
        alias = self.table.key
        chosen = self.targets("alias")
        if not self.has_class("-chat"):
            line = f"lorad aliases {shlex.quote(chosen[0])}" if chosen else "lorad aliases --traffic"
            self.offer(line, *chosen)
        self.tell()
        if alias != self._reader.alias:
            self._reader.alias = alias
            if self._settling is not None:
                self._settling.stop()
            self._settling = self.set_timer(_SETTLED, self.lorad.feed.again)

    # -- what keys act on ------------------------------------------------------------------------------------
    def targets(self, on: str) -> list[str]:
        chosen = self.table.chosen if self._data and self._data.aliases else []
        if on != "version":
            return chosen if on == "alias" else []
        rows = [self._data.of(alias) for alias in chosen] if self._data else []
        return [alias_rows.version_of(row) for row in rows if row is not None]

    def has(self, target: str) -> bool:
        return self._data is None or self._data.of(target) is not None

    def owner(self, target: str) -> str | None:
        row = self._data.of(target) if self._data else None
        return row.owner if row else None

    def on_rows_selected(self, event: Rows.Selected) -> None:
        row = self._data.of(event.key) if self._data else None
        if row is not None:
            self.lorad.open_run(row.run)

    # -- the chat --------------------------------------------------------------------------------------------
    def action_chat(self) -> None:
        """Open a chat with what is under the cursor, beside the version it served before."""
        self.set_class(True, "-chat")
        data = self._data
        alias = self.table.key
        row = data.of(alias) if data else None
        if data is None or alias is None or row is None:
            self.chat.open("", "")
            return
        moves = data.moves if data.alias == alias else []
        served = [alias_rows.version_of(move) for move in moves if move.version is not None]
        before = next((version for version in served if version != alias_rows.version_of(row)), "")
        self.chat.open(alias, before)

    def on_chat_panel_asked(self, message: ChatPanel.Asked) -> None:
        self.say_command(message.line)

    def on_chat_panel_refused(self, message: ChatPanel.Refused) -> None:
        self.say_error(message.error)

    def on_chat_panel_left(self) -> None:
        self.set_class(False, "-chat")
        self.table.focus()
