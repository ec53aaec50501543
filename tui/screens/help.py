"""The keys, straight from their one list."""

from collections.abc import Mapping, Sequence
from typing import cast

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.keys import key_to_character
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from lorad.tui import keys
from lorad.tui.actions import ACTIONS
from lorad.tui.port import AppPort

_Sections = dict[str, list[Binding]]
_KEYS, _IDS = 13, 20  # cells
# headings of what is not of one screen alone, the last one last
_COMMON = ("", "Tables", "Texts", "Everywhere")
_FILTER = (
    "Filter: words that a run must have; state: owner: base: pool: alarm: look there\n"
    "only, as in state:running owner:ann; !word keeps runs without it.\n"
)
_ABOUT = (
    "The status line shows the shell command for what you see or did; y copies it. : takes commands with "
    "arguments, as in stop sweep-*; ctrl+p finds actions by a part of their name.\nThe words at "
    "the right are ids: tui.keymap of config.yaml gives an id other keys, as in "
    "{run.kill: ctrl+k}."
)
_TYPED = "While a text is typed, f1 opens this help."


class Help(ModalScreen[None]):
    """The keys of where one is; a search goes through all. here: the ids of keys that work there, the nearest
    first."""

    DEFAULT_CSS = """
    Help { align: center middle; background: $background 60%; }
    Help #help { width: 78; max-width: 95%; height: auto; max-height: 95%;
    padding: 0 2; border: round $primary;
        background: $surface; }
    Help #help-search { display: none; height: 1; }
    Help #help-keys { height: auto; }
    """
    BINDINGS = keys.CLOSE
    AUTO_FOCUS = ""

    def __init__(self, here: Sequence[str]) -> None:
        super().__init__()
        self._here = here

    def compose(self) -> ComposeResult:
        with Vertical(id="help"):
            yield Input(
                id="help-search", placeholder="words of a key, its meaning, id or heading", compact=True
            )
            with VerticalScroll(id="help-keys", can_focus=False):
                yield Static(id="help-table")

    def on_mount(self) -> None:
        self._draw()

    @property
    def _search(self) -> Input:
        return self.query_one("#help-search", Input)

    def _draw(self) -> None:
        wanted, keymap = self._search.value.casefold().split(), cast(AppPort, self.app).config.tui.keymap
        sections = _found(wanted, keymap) if wanted else _nearest(self._here)
        self.query_one("#help").border_title = (
            f"keys: {' '.join(wanted)}" if wanted else "keys that work here"
        )
        self.query_one("#help").border_subtitle = "/ searches all keys · esc closes"
        if not sections:
            self.query_one("#help-table", Static).update(Text("No key has all of these words."))
            return
        intro = (
            [] if wanted else [Text((_FILTER if "The dashboard" in sections else "") + f"{_ABOUT}\n{_TYPED}")]
        )
        self.query_one("#help-table", Static).update(Group(_key_table(sections, keymap), *intro))
        self.query_one("#help-keys").scroll_home(animate=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return keys.opens(self, action)

    def action_search(self) -> None:
        self._search.display = True
        self._search.focus()

    def action_back(self) -> None:
        if not self._search.display:
            self.dismiss()
            return
        self._search.value, self._search.display = "", False
        self.set_focus(None)

    def action_scroll(self, by: int) -> None:
        self.query_one("#help-keys").scroll_relative(y=by, animate=False)

    def on_input_changed(self) -> None:
        self._draw()

    def on_input_submitted(self) -> None:
        """Other keys have their meaning again, and what was found stays."""
        self.set_focus(None)


def _nearest(here: Sequence[str]) -> _Sections:
    """The sections of these ids, in their order; what is not of one screen alone last."""
    places = {id: place for place, id in enumerate(here)}
    known = {
        heading: [places[key.id] for key in some if key.id in places] for heading, some in _listed().items()
    }
    headings = sorted(
        (heading for heading in known if known[heading]), key=lambda heading: min(known[heading])
    )
    headings.sort(key=lambda heading: _COMMON.index(heading) if heading in _COMMON else 0)
    return {heading: _listed()[heading] for heading in headings}


def _found(words: Sequence[str], keymap: Mapping[str, str]) -> _Sections:
    """Return the keys that match all words."""
    has = {
        heading: [key for key in some if all(word in _searched(heading, key, keymap) for word in words)]
        for heading, some in _listed().items()
    }
    return {heading: some for heading, some in has.items() if some}


def _searched(heading: str, key: Binding, keymap: Mapping[str, str]) -> str:
    """Return the text that a search looks through."""
    return f"{heading} {_typed(key, keymap)} {_meaning(key)} {key.id}".casefold()


def _listed() -> _Sections:
    return {heading: [key for key in some if isinstance(key, Binding)] for heading, some in keys.HELP.items()}


def _typed(key: Binding, keymap: Mapping[str, str]) -> str:
    """Return the names of the keys for this action."""
    return key_names(keymap.get(key.id or "", key.key))


def _key_table(sections: _Sections, keymap: Mapping[str, str]) -> Group:
    """keymap: other keys than ours, by id."""
    parts: list[RenderableType] = []
    for heading, bindings in sections.items():
        table = Table.grid(
            Column(width=_KEYS), Column(ratio=1), Column(width=_IDS, no_wrap=True), padding=(0, 1)
        )
        table.expand = True
        for key in bindings:
            table.add_row(
                Text(_typed(key, keymap), style="cyan"), Text(_meaning(key)), Text(key.id or "", style="dim")
            )
        parts += [Text(heading, style="bold"), table]
    return Group(*parts)


def key_names(typed: str) -> str:
    """number_sign,escape -> # esc"""
    return " ".join(_key_name(key.strip()) for key in typed.split(","))


def _key_name(key: str) -> str:
    character = "/" if key == "slash" else key_to_character(key) or ""
    return character if character.isprintable() and character.strip() else "esc" if key == "escape" else key


def _meaning(binding: Binding) -> str:
    """Return what an action does; for other keys, their description."""
    verb = binding.action.partition("'")[2].rstrip("')")
    action = ACTIONS.get(verb)
    return (
        f"{binding.description}: {action.says[0].lower()}{action.says[1:]}" if action else binding.description
    )
