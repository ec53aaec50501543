"""The spec of a run: as YAML, and beside that of another one."""

import asyncio
import contextlib
import shlex

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.suggester import SuggestFromList
from textual.widgets import Input

from lorad.client.client import Client
from lorad.errors import LoradError
from lorad.records.runs import RunDetails
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes
from lorad.tui.screens.tab import RunTab
from lorad.tui.spec_lines import SAME, Flat, SpecLine, differing, flat, lines, text_of, value_text
from lorad.tui.widgets.line import Line
from lorad.tui.yaml import rendered

_NAMES = 500  # of runs that the field for another one completes


class SpecScroll(VerticalScroll):
    BINDINGS = bindings("spec_text")


class Prompt(Input):
    """A field that is out of the way until it is asked for, and with escape again."""

    BINDINGS = bindings("prompt")

    class Closed(Message):
        """The prompt was closed with escape."""

    def action_close(self) -> None:
        self.value = ""
        self.display = False
        self.post_message(self.Closed())


class SpecTab(RunTab):
    TITLE = "spec"
    BINDINGS = bindings("spec")
    DEFAULT_CSS = """
    SpecTab SpecScroll { height: 1fr; padding: 0 1; }
    SpecTab SpecScroll Line { width: auto; }
    SpecTab .about { height: auto; max-height: 4; padding: 0 1; color: $text-muted; }
    SpecTab Prompt { display: none; height: 1; padding: 0 1; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._run: RunDetails | None = None
        self._other: RunDetails | None = None  # the run that it is compared with
        self._all = False
        self._match = 0  # of the lines that have what is searched for

    def compose(self) -> ComposeResult:
        yield Line(classes="about")
        with SpecScroll():
            yield Line(id="spec-text")
        yield Prompt(id="spec-search", placeholder="search; enter: the next one", compact=True)
        yield Prompt(id="spec-other", placeholder="a run to compare with; empty: none", compact=True)

    def focus_first(self) -> None:
        self.query_one(SpecScroll).focus()

    def command(self) -> str:
        return f"lorad show {shlex.quote(self.run_name)} --json"

    def read(self, client: Client, changes: Changes, run: RunDetails) -> RunDetails | None:
        return run if changes.touch(self.run_name, "state") else None

    def show(self, data: RunDetails) -> None:
        self._run = data
        self._draw()

    # -- what is shown ---------------------------------------------------------------------------------------
    @property
    def spec(self) -> Flat:
        return self._values(self._run) if self._run else {}

    def _values(self, run: RunDetails) -> Flat:
        values = flat(run.spec)
        return values if self._all else differing(values)

    def _lines(self) -> list[SpecLine]:
        """Return the lines to show: beside another run those that differ, or all of them with `_all`."""
        if self._other is None:
            return lines(self.spec)
        all_lines = lines(self.spec, self._values(self._other))
        if self._all:
            return all_lines
        keys_shown = {line.key for line in all_lines if line.sign != SAME}
        return [
            line
            for line in all_lines
            if any(key == line.key or key.startswith(f"{line.key}.") for key in keys_shown)
        ]

    def _draw(self) -> None:
        if self._run is None:
            return
        shown = self._lines()
        nothing = "No key differs." if self._other else "Every key has its default."
        text = rendered(shown, word=self._searched) if shown else Text(nothing)
        self.query_one("#spec-text", Line).say(text)
        what = "All keys" if self._all else "What is not the default"
        if self._other is not None:
            what = f"Against {self._other.name}: ~ another value, + only here, - only there"
            what += "" if self._all else "; defaults left out"
        parts = [Text(one_line(what))]
        for attempt in self._run.attempts:
            if attempt.changed:
                changed = ", ".join(f"~ {key}={value_text(value)}" for key, value in attempt.changed.items())
                parts.append(Text(one_line(f"Attempt {attempt.attempt} changed: {changed}")))
        self.query_one(".about", Line).say(Text("\n").join(parts))

    # -- searching -------------------------------------------------------------------------------------------
    @property
    def _searched(self) -> str:
        return self.query_one("#spec-search", Input).value.strip().lower()

    def _go(self, match: int) -> None:
        """Scroll to a match; after the last one comes the first."""
        places = [place for place, line in enumerate(self._lines()) if self._searched in line.text.lower()]
        if self._searched and places:
            self._match = match % len(places)
            self.query_one(SpecScroll).scroll_to(y=max(places[self._match] - 2, 0), animate=False)

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "spec-search":
            self._draw()
            self._go(0)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "spec-search":
            self._go(self._match + 1)
        else:
            self.compare_with(event.value.strip())

    def on_prompt_closed(self) -> None:
        self.focus_first()

    # -- comparing -------------------------------------------------------------------------------------------
    @work(exclusive=True)
    async def compare_with(self, name: str) -> None:
        """Compare with the spec of another run as it is now; "": with none."""
        try:
            self._other = await asyncio.to_thread(self.base.client.show, name) if name else None
        except LoradError as error:
            self.base.say_error(error)
            return
        self.query_one("#spec-other").display = False
        self._draw()
        self.focus_first()

    @work(exclusive=True, group="names")
    async def complete(self) -> None:
        with contextlib.suppress(LoradError):
            runs = await asyncio.to_thread(self.base.client.list, all=True, limit=_NAMES)
            names = [run.name for run in runs if run.name != self.run_name]
            self.query_one("#spec-other", Input).suggester = SuggestFromList(names)

    # -- keys ------------------------------------------------------------------------------------------------
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not isinstance(self.screen.focused, Prompt)

    def action_all(self) -> None:
        self._all = not self._all
        self._draw()

    def action_ask(self, what: str) -> None:
        """Open the field for the words of a `search`, or for the `other` run."""
        field = self.query_one(f"#spec-{what}", Input)
        field.display = True
        self.screen.set_focus(field)  # at once: what is typed next is its
        if what == "other":
            self.complete()

    def action_like(self) -> None:
        self.base.lorad.open("form", self.run_name)

    def action_copy_yaml(self) -> None:
        self.app.copy_to_clipboard(text_of(self.spec))
        self.notify(f"Copied: {len(self.spec)} keys of the spec", timeout=2, markup=False)
