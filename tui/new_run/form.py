"""The fields of a spec by section, and the YAML that they make."""

from collections.abc import Iterable, Mapping
from itertools import groupby

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Input

from lorad.tui.draft import MORE, Draft
from lorad.tui.new_run.choice import Choice
from lorad.tui.spec_fields import Entry, entry
from lorad.tui.spec_lines import Flat, SpecLine, lines
from lorad.tui.widgets.line import Line
from lorad.tui.yaml import WRONG, rendered


class Fields(VerticalScroll, inherit_bindings=False, can_focus=False):
    """Arrows go from field to field, not by lines."""


class Panes(Container):
    """Side by side in a wide terminal, else one below the other, and in a small one this or that:
    see `flip`.
    """

    SCOPED_CSS = False  # the width of the screen decides
    DEFAULT_CSS = """
    Panes { height: 1fr; width: 100%; layout: vertical; }
    Panes Fields { height: 2fr; padding: 0 1; }
    Panes #yaml { height: 1fr; padding: 0 1; background: $surface; border-top: solid $primary; }
    Panes #yaml:focus { border-top: solid $accent; }
    Panes #yaml Line { width: auto; }
    Panes .heading { height: 1; color: $text-accent; text-style: bold; }
    Panes .section { height: auto; }
    Panes .labels { width: 23; padding: 0 1 0 0; height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    Panes .values { width: 1fr; height: auto; }
    Panes.-flip #yaml { display: none; }
    .-wide Panes { layout: horizontal; }
    .-wide Panes .labels { width: 27; }
    .-wide Panes Fields, .-wide Panes #yaml { width: 1fr; height: 100%; }
    .-wide Panes #yaml { border-top: none; border-left: solid $primary; }
    .-wide Panes #yaml:focus { border-left: solid $accent; }
    .-narrow Panes #yaml, .-short Panes #yaml { display: none; }
    .-narrow Panes.-flip #yaml, .-short Panes.-flip #yaml { display: block; }
    .-narrow Panes.-flip Fields, .-short Panes.-flip Fields { display: none; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._keys: dict[Widget, str] = {}
        self._labels: dict[Line, list[str]] = {}
        self._told: list[SpecLine] = []
        self._last = MORE  # the key whose field had the focus

    def compose(self) -> ComposeResult:
        yield Fields(id="fields")
        yield VerticalScroll(Line(), id="yaml")

    async def fill(self, texts: Mapping[str, str]) -> None:
        """A field for each key, and one for whatever else."""
        sections = [(name, [*some]) for name, some in groupby(map(entry, texts), lambda one: one.section)]
        parts = [part for name, entries in sections for part in self._section(name or "run", entries, texts)]
        more = Entry(MORE, "", "key=value …", "", "", is_text=True)
        await self.query_one(Fields).mount(*parts, *self._section("anything else", [more], {}))
        next(iter(self._keys)).focus()

    def _section(self, name: str, entries: list[Entry], texts: Mapping[str, str]) -> Iterable[Widget]:
        """Labels are one widget for all: a form of many is there at once."""
        fields = [_field(one, texts.get(one.key, "")) for one in entries]
        self._keys |= {made: one.key for made, one in zip(fields, entries, strict=True)}
        labels = Line(classes="labels")
        self._labels[labels] = [one.key for one in entries]
        yield Line(Text(name), classes="heading")
        yield Horizontal(labels, Vertical(*fields, classes="values"), classes="section")

    def show(self, draft: Draft, first: Flat) -> None:
        """first: what the form began with, for the signs."""
        for labels, keys in self._labels.items():
            labels.say(Text("\n").join(_label(key, key in draft.wrong) for key in keys))
        shown = lines(draft.values, {key: value for key, value in first.items() if key in draft.values})
        self.query_one("#yaml Line", Line).say(rendered(shown, draft.wrong))
        self._told = shown
        self.look_at(self.key_of(self.screen.focused))

    def look_at(self, key: str) -> None:
        """The line of a key in the YAML."""
        places = [place for place, line in enumerate(self._told) if line.key == key]
        yaml = self.query_one("#yaml")
        if places and not yaml.scroll_offset.y <= places[0] < yaml.scroll_offset.y + yaml.size.height:
            yaml.scroll_to(y=max(places[0] - 2, 0), animate=False)

    def key_of(self, field: Widget | None) -> str:
        """ "" of what is none."""
        return self._keys.get(field, "") if field is not None else ""

    def focus_on(self, key: str) -> None:
        """Focus the field of a key; a key without a field has that for any other key."""
        by_key = {key: made for made, key in self._keys.items()}
        if not self.query_one(Fields).display:
            self.remove_class("-flip")
        by_key.get(key, by_key[MORE]).focus()

    def move(self, by: int) -> None:
        """Focus the field before or after at once, if there is one; the YAML scrolls by a line."""
        fields, focused = list(self._keys), self.screen.focused
        if focused in self._keys:
            self.screen.set_focus(fields[min(max(fields.index(focused) + by, 0), len(fields) - 1)])
        else:
            self.query_one("#yaml").scroll_relative(y=by, animate=False)

    def flip(self) -> None:
        self._last = self.key_of(self.screen.focused) or self._last
        self.toggle_class("-flip")
        self.call_after_refresh(self._refocus)

    def _refocus(self) -> None:
        """Keys go to what can be seen."""
        if self.query_one(Fields).display:
            self.focus_on(self._last)
        else:
            self.query_one("#yaml").focus()


def _field(one: Entry, text: str) -> Widget:
    if one.choices:
        return Choice(one.choices, one.default, text)
    return Input(text, placeholder=one.default, compact=True)


def _label(key: str, is_wrong: bool) -> Text:
    label = "key=value …" if key == MORE else entry(key).label or key
    return Text(f"{WRONG} {label}", style="bold red") if is_wrong else Text(f"  {label}")
