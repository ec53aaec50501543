"""The keys, straight from their one list."""

from collections.abc import Sequence
from typing import cast

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.keys import key_to_character
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from lorad.tui.actions.action import Action
from lorad.tui.actions.table import HELP, bindings, opens
from lorad.tui.port import AppPort

_Sections = dict[str, list[Action]]
_KEYS = 13  # cells
_IDS = 20
# headings of what is not of one screen alone, the last one last
_COMMON = ("", "Tables", "Texts", "Everywhere")
_FILTER = (
    "Filter: words that a run must have; state: owner: base: pool: alarm: look there\n"
    "only, as in state:running owner:ann; !word keeps runs without it.\n"
)
_ABOUT = (
    "The status line shows the shell command for what you see or did; y copies it. : takes commands with "
    "arguments, as in stop sweep-*; ctrl+p finds actions by a part of their name.\n"
    "The words at the right are ids: tui.keymap of config.yaml gives an id other keys, as in "
    "{run.kill: ctrl+k}."
)
_TYPED = "While a text is typed, f1 opens this help."


class Help(ModalScreen[None]):
    """The keys that work where the user is; a search goes through all.

    working: the ids of the keys that work, the nearest first.
    """

    DEFAULT_CSS = """
    Help { align: center middle; background: $background 60%; }
    Help #help { width: 78; max-width: 95%; height: auto; max-height: 95%;
    padding: 0 2; border: round $primary;
        background: $surface; }
    Help #help-search { display: none; height: 1; }
    Help #help-keys { height: auto; }
    """
    BINDINGS = bindings("close")
    AUTO_FOCUS = ""

    def __init__(self, working: Sequence[str]) -> None:
        super().__init__()
        self._working = working
        placeholder = "words of a key, its meaning, id or heading"
        self._search = Input(id="help-search", placeholder=placeholder, compact=True)

    def compose(self) -> ComposeResult:
        with Vertical(id="help"):
            yield self._search
            with VerticalScroll(id="help-keys", can_focus=False):
                yield Static(id="help-table")

    def on_mount(self) -> None:
        self._draw()

    def _draw(self) -> None:
        words = self._search.value.casefold().split()
        keymap = cast(AppPort, self.app).config.tui.keymap
        sections: _Sections = {}
        if words:  # which are all a part of the line and the heading of a key
            for heading, rows in HELP.items():
                for row in rows:
                    typed = key_names(keymap.get(row.id, row.keys))
                    text = f"{heading} {typed} {row.meaning} {row.id}".casefold()
                    if all(word in text for word in words):
                        sections.setdefault(heading, []).append(row)
        else:  # what works, in its order; what is not of one screen alone comes last
            places = {id: place for place, id in enumerate(self._working)}
            first = dict[str, int]()
            for heading, rows in HELP.items():
                if inside := [places[row.id] for row in rows if row.id in places]:
                    first[heading] = min(inside)
            headings = sorted(first, key=first.__getitem__)
            headings.sort(key=lambda heading: _COMMON.index(heading) if heading in _COMMON else 0)
            sections = {heading: HELP[heading] for heading in headings}
        self.query_one("#help").border_title = f"keys: {' '.join(words)}" if words else "keys that work here"
        self.query_one("#help").border_subtitle = "/ searches all keys · esc closes"
        if not sections:
            self.query_one("#help-table", Static).update(Text("No key has all of these words."))
            return
        intro = Text((_FILTER if "The dashboard" in sections else "") + f"{_ABOUT}\n{_TYPED}")
        parts: list[RenderableType] = []
        for heading, rows in sections.items():
            table = Table.grid(
                Column(width=_KEYS), Column(ratio=1), Column(width=_IDS, no_wrap=True), padding=(0, 1)
            )
            table.expand = True
            for row in rows:
                typed = key_names(keymap.get(row.id, row.keys))
                table.add_row(Text(typed, style="cyan"), Text(row.meaning), Text(row.id, style="dim"))
            parts += [Text(heading, style="bold"), table]
        self.query_one("#help-table", Static).update(Group(*parts, *([] if words else [intro])))
        self.query_one("#help-keys").scroll_home(animate=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return opens(self, action)

    def action_search(self) -> None:
        self._search.display = True
        self._search.focus()

    def action_back(self) -> None:
        if not self._search.display:
            self.dismiss()
            return
        self._search.value = ""
        self._search.display = False
        self.set_focus(None)

    def action_scroll(self, by: int) -> None:
        self.query_one("#help-keys").scroll_relative(y=by, animate=False)

    def on_input_changed(self) -> None:
        self._draw()

    def on_input_submitted(self) -> None:
        """Give other keys their meaning again; what was found stays."""
        self.set_focus(None)


def key_names(typed: str) -> str:
    """Write keys as they are on a keyboard: `number_sign,escape` becomes `# esc`."""
    names = []
    for key in map(str.strip, typed.split(",")):
        character = "/" if key == "slash" else key_to_character(key) or ""
        name = "esc" if key == "escape" else key
        names.append(character if character.isprintable() and character.strip() else name)
    return " ".join(names)
