"""A new run: a form with the YAML that it makes beside it, checked as it is typed."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Input

from lorad.client.client import Client
from lorad.errors import LoradError
from lorad.text import one_line
from lorad.tui.actions.action import Field
from lorad.tui.actions.table import bindings
from lorad.tui.actions.verbs import needed
from lorad.tui.draft import MORE, Draft, DraftSource, blamed, command, draw_up, named, rebased
from lorad.tui.feed import Changes
from lorad.tui.new_run import sources
from lorad.tui.new_run.choice import ChoiceField
from lorad.tui.new_run.pick import Pick
from lorad.tui.screens.base import Base
from lorad.tui.screens.dialogs import AskDialog, Confirm
from lorad.tui.spec_fields import Entry, entry
from lorad.tui.spec_lines import Flat, SpecLine, lines, text_of
from lorad.tui.widgets.line import Line
from lorad.tui.yaml import WRONG, rendered

_SILENT = 600.0  # seconds in which the daemon says nothing at all
_PATH = (Field("path", "path", says="of a YAML file", check=needed),)


class Fields(VerticalScroll, inherit_bindings=False, can_focus=False):
    """Arrows go from field to field, not by lines."""


class FormPanes(Container):
    """Fields and YAML, side by side or one below the other; in a small terminal one of them, see `flip`."""

    SCOPED_CSS = False  # the width of the screen decides
    DEFAULT_CSS = """
    FormPanes { height: 1fr; width: 100%; layout: vertical; }
    FormPanes Fields { height: 2fr; padding: 0 1; }
    FormPanes #yaml { height: 1fr; padding: 0 1; background: $surface; border-top: solid $primary; }
    FormPanes #yaml:focus { border-top: solid $accent; }
    FormPanes #yaml Line { width: auto; }
    FormPanes .heading { height: 1; color: $text-accent; text-style: bold; }
    FormPanes .section { height: auto; }
    FormPanes .labels { width: 23; padding: 0 1 0 0; height: auto; text-wrap: nowrap;
        text-overflow: ellipsis; }
    FormPanes .values { width: 1fr; height: auto; }
    FormPanes.-flip #yaml { display: none; }
    .-wide FormPanes { layout: horizontal; }
    .-wide FormPanes .labels { width: 27; }
    .-wide FormPanes Fields, .-wide FormPanes #yaml { width: 1fr; height: 100%; }
    .-wide FormPanes #yaml { border-top: none; border-left: solid $primary; }
    .-wide FormPanes #yaml:focus { border-left: solid $accent; }
    .-narrow FormPanes #yaml, .-short FormPanes #yaml { display: none; }
    .-narrow FormPanes.-flip #yaml, .-short FormPanes.-flip #yaml { display: block; }
    .-narrow FormPanes.-flip Fields, .-short FormPanes.-flip Fields { display: none; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._keys: dict[Widget, str] = {}
        self._labels: dict[Line, list[str]] = {}
        self._lines: list[SpecLine] = []
        self._last = MORE  # the key whose field had the focus

    def compose(self) -> ComposeResult:
        yield Fields(id="fields")
        yield VerticalScroll(Line(), id="yaml")

    async def fill(self, texts: Mapping[str, str]) -> None:
        """Make a field for each key, and one for any other key."""
        by_section = groupby(map(entry, texts), lambda entry: entry.section)
        sections = [(name, [*entries]) for name, entries in by_section]
        parts = [part for name, entries in sections for part in self._section(name or "run", entries, texts)]
        more = Entry(MORE, "", "key=value …", "", "", is_text=True)
        await self.query_one(Fields).mount(*parts, *self._section("anything else", [more], {}))
        next(iter(self._keys)).focus()

    def _section(self, name: str, entries: list[Entry], texts: Mapping[str, str]) -> Iterable[Widget]:
        """Make the fields of a section, and one widget for all labels: a large form is there at once."""
        fields: list[Widget] = []
        for row in entries:
            text = texts.get(row.key, "")
            if row.choices:
                fields.append(ChoiceField(row.choices, row.default, text))
            else:
                fields.append(Input(text, placeholder=row.default, compact=True))
            self._keys[fields[-1]] = row.key
        labels = Line(classes="labels")
        self._labels[labels] = [row.key for row in entries]
        yield Line(Text(name), classes="heading")
        yield Horizontal(labels, Vertical(*fields, classes="values"), classes="section")

    def show(self, draft: Draft, first: Flat) -> None:
        """Show the YAML and what is wrong. first: what the form began with, for the signs."""
        for labels, names in self._labels.items():
            texts = []
            for key in names:
                label = "key=value …" if key == MORE else entry(key).label or key
                is_wrong = key in draft.wrong
                texts.append(Text(f"{WRONG} {label}", "bold red") if is_wrong else Text(f"  {label}"))
            labels.say(Text("\n").join(texts))
        shown = lines(draft.values, {key: value for key, value in first.items() if key in draft.values})
        self.query_one("#yaml Line", Line).say(rendered(shown, draft.wrong))
        self._lines = shown
        self.look_at(self.key_of(self.screen.focused))

    def look_at(self, key: str) -> None:
        """Scroll to the line of a key in the YAML."""
        places = [place for place, line in enumerate(self._lines) if line.key == key]
        yaml = self.query_one("#yaml")
        if places and not yaml.scroll_offset.y <= places[0] < yaml.scroll_offset.y + yaml.size.height:
            yaml.scroll_to(y=max(places[0] - 2, 0), animate=False)

    def key_of(self, field: Widget | None) -> str:
        """Return the key of a field, or "" for another widget."""
        return self._keys.get(field, "") if field is not None else ""

    def focus_on(self, key: str) -> None:
        """Focus the field of a key; a key without a field has that for any other key."""
        by_key = {key: widget for widget, key in self._keys.items()}
        if not self.query_one(Fields).display:
            self.remove_class("-flip")
        by_key.get(key, by_key[MORE]).focus()

    def move(self, by: int) -> None:
        """Focus the field before or after at once, if there is one; the YAML scrolls by a line."""
        fields = list(self._keys)
        focused = self.screen.focused
        if focused in self._keys:
            self.screen.set_focus(fields[min(max(fields.index(focused) + by, 0), len(fields) - 1)])
        else:
            self.query_one("#yaml").scroll_relative(y=by, animate=False)

    def flip(self) -> None:
        self._last = self.key_of(self.screen.focused) or self._last
        self.toggle_class("-flip")
        self.call_after_refresh(self._focus_again)

    def _focus_again(self) -> None:
        """Give the focus to what can be seen."""
        if self.query_one(Fields).display:
            self.focus_on(self._last)
        else:
            self.query_one("#yaml").focus()


class NewRun(Base):
    BINDINGS = bindings("form")
    DEFAULT_CSS = """
    NewRun #says { height: 2; padding: 0 1; }
    NewRun.-short #says { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, like: str | None = None) -> None:
        super().__init__()
        self._like = like
        self._source = DraftSource("", {}, sources.cwd())
        self._texts: dict[str, str] = {}
        self._draft = Draft({})
        self._refused: dict[str, str] = {}  # by the daemon, of what is there now, by key
        self._is_starting = False
        self.panes = FormPanes(id="form")
        self._says = Line(id="says")

    def body(self) -> Iterable[Widget]:
        yield self.panes
        yield self._says

    def read(self, client: Client, changes: Changes) -> Any | None:
        return None

    # -- what it begins with ---------------------------------------------------------------------------------
    def on_mount(self) -> None:
        self.say_title(Text("New run"))
        self.begin()

    @work
    async def begin(self) -> None:
        source: DraftSource | None = None
        if self._like is not None:
            try:
                source = sources.of_run(await asyncio.to_thread(self.client.show, self._like))
            except LoradError as error:
                self.notify(one_line(error.in_full), severity="error", markup=False)
        if source is None:
            source = await self.app.push_screen_wait(Pick(self.client))
        if source is None:
            self.dismiss()
            return
        self._source = source
        self._texts = source.texts
        await self.panes.fill(self._texts)
        self._draw()
        if source.note:
            self.notify(source.note, timeout=10, markup=False)

    # -- what is shown ---------------------------------------------------------------------------------------
    @property
    def changed(self) -> int:
        """Return how many fields differ from what they were at first."""
        first = self._source.texts
        return sum(text.strip() != first.get(key, "").strip() for key, text in self._texts.items())

    def _draw(self) -> None:
        fields = {key: text for key, text in self._texts.items() if key != MORE}
        self._draft = draw_up(fields, self._texts.get(MORE, ""))
        self._show_wrong()
        self.say_command(command(self._source, self._draft.values, sources.cwd()))
        parts = [self._source.title, f"{self.changed} changed" if self.changed else "as it is"]
        parts += [f"{len(self._draft.wrong)} wrong"] if self._draft.wrong else []
        parts += [f"paths begin at {self._source.cwd}"] if self._source.cwd != sources.cwd() else []
        self.say_title(Text.assemble(("New run", "bold"), f"  from {one_line(' · '.join(parts))}"))
        self._say()

    def _show_wrong(self) -> None:
        marked = replace(self._draft, wrong=self._draft.wrong | self._refused)
        self.panes.show(marked, self._source.values)

    def _say(self) -> None:
        """Show what is wrong, first in the focused field; if nothing is, describe that field."""
        key = self.panes.key_of(self.focused)
        wrong = self._draft.wrong | self._refused
        reason = wrong.get(key) or next(iter(wrong.values()), "")
        if reason:
            said = Text(f"✖ {one_line(reason)}", style="bold red")
        elif key == MORE:
            said = Text(
                "Any other key=value, and more after a space: trainer.betas='[0.9, 0.98]'", style="dim"
            )
        else:
            said = Text(f"{key}: {entry(key).says}" if key else "", style="dim")
        self._says.say(said)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._take(event.input, event.value)

    def on_choice_field_changed(self, event: ChoiceField.Changed) -> None:
        self._take(event.choice, event.choice.value)

    def _take(self, field: Widget, text: str) -> None:
        key = self.panes.key_of(field)
        if key and self._texts.get(key, "") != text:
            self._texts[key] = text
            self._refused = {}
            self._draw()

    def on_descendant_focus(self) -> None:
        if self._texts:
            self._say()
            self.panes.look_at(self.panes.key_of(self.focused))

    # -- keys ------------------------------------------------------------------------------------------------
    def action_move(self, by: int) -> None:
        self.panes.move(by)

    def action_flip(self) -> None:
        self.panes.flip()

    def action_start(self) -> None:
        if self._draft.wrong:
            self.panes.focus_on(next(iter(self._draft.wrong)))
            self._say()
        elif not self._is_starting and self._texts:
            self.start()

    @work
    async def start(self) -> None:
        """Start the run. The daemon checks model, data and reward; the form stays until it agrees."""
        self._is_starting = True
        self._says.say("The daemon checks model, data and reward …")
        try:
            self.must_act()
            name, warnings = await asyncio.to_thread(self._request, self._draft.text, str(self._source.cwd))
        except LoradError as error:
            about, reason = blamed(error)
            key = next((key for key in self._texts if about and f"{key}.".startswith(f"{about}.")), about)
            self._refused = {key: named(about, reason, error.hint)}
            if key in self._texts:
                self.panes.focus_on(key)
            self._show_wrong()
            self._say()
            return
        finally:
            self._is_starting = False
        for warning in warnings:
            self.app.notify(one_line(warning), severity="warning", timeout=6, markup=False)
        self.dismiss()
        self.lorad.open_run(name)

    def _request(self, text: str, cwd: str) -> tuple[str, list[str]]:
        """Ask the daemon for the run, and return its name and what the daemon warned of."""
        client = self.client
        answer = client.patient(_SILENT).telling(
            lambda words: self.app.call_from_thread(self._tell_doing, words)
        )
        name = answer.run(text, source="the form", cwd=cwd, overrides=[], name=None).name
        with contextlib.suppress(LoradError):  # it exists all the same
            return name, client.show(name).warnings
        return name, []

    def _tell_doing(self, words: str) -> None:
        if words and self._is_starting:
            self._says.say(f"The daemon: {one_line(words)} …")

    @work
    async def action_write(self) -> None:
        """Write the YAML to a file; from then on it is the form of that file."""
        line = "lorad run {}".format
        ask = AskDialog("Write the YAML", _PATH, lambda values: line(values["path"]), {"path": sources.FILE})
        values = await self.app.push_screen_wait(ask)
        if values is None:
            return
        path = sources.absolute(values["path"])
        try:
            lost = await asyncio.to_thread(sources.lost_by_writing, path)
            if not lost or await self.app.push_screen_wait(Confirm("Replace", {str(path): lost})):
                moved = rebased(self._draft.values, self._source.cwd, path.parent)
                await asyncio.to_thread(sources.write, path, text_of(moved))
                self._source = await asyncio.to_thread(sources.of_file, path)
                self._draw()
                self.notify(f"Wrote {one_line(str(path))}", timeout=3, markup=False)
        except LoradError as error:
            self.say_error(error)

    @work
    async def action_back(self) -> None:
        changes = "1 setting was" if self.changed == 1 else f"{self.changed} settings were"
        lost = {"this form": f"{changes} changed, and nothing was started or written."}
        if not self.changed or await self.app.push_screen_wait(Confirm("Discard", lost)):
            self.dismiss()
