"""Picks what a new run starts from: a template, a file, or another run; typing narrows the list."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from lorad.client.client import Client
from lorad.client.words import steps_in_words
from lorad.errors import LoradError
from lorad.records.runs import Run
from lorad.spec.templates import TEMPLATES
from lorad.text import coarse_age, one_line
from lorad.tui import keys
from lorad.tui.dashboard.run_rows import eval_text, state_text
from lorad.tui.draft import Source
from lorad.tui.new_run import sources

_RUNS = 300  # of those that ended, the newest


@dataclass(frozen=True)
class _Offer:
    """has: whether it is what was typed. load: the spec, on a thread."""

    name: str
    shown: Text
    has: Callable[[str], bool]
    load: Callable[[], Source]


class Pick(ModalScreen[Source | None]):
    """Returns what was picked, or None if the user left."""

    BINDINGS = keys.OVER + keys.PICK
    AUTO_FOCUS = "Input"
    DEFAULT_CSS = """
    Pick { align: center middle; background: $background 60%; }
    Pick #pick { width: 90; max-width: 95%; height: 80%; min-height: 7; padding: 0 1;
        border: round $primary; background: $surface; }
    Pick OptionList { height: 1fr; border: none; background: $surface; padding: 0; text-wrap: nowrap;
        text-overflow: ellipsis; }
    Pick #wrong { height: auto; max-height: 3; }
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._offers = [_template(name) for name in TEMPLATES]
        self._found: list[_Offer] = []

    def compose(self) -> ComposeResult:
        with Vertical(id="pick"):
            yield Static(Text("New run: from what?", style="bold"))
            yield Input(placeholder="a template, words of a run, or the path of a YAML file", compact=True)
            yield OptionList(markup=False)
            yield Static(id="wrong", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
        self._draw()
        self.look()

    @work
    async def look(self) -> None:
        """Files and runs, when they are known."""
        self._offers += [_file(name) for name in await asyncio.to_thread(sources.specs_here)]
        self._draw()
        try:
            runs = await asyncio.to_thread(self._client.list, all=True, limit=_RUNS)
        except LoradError as error:
            self._tell(error)
            return
        self._offers += [_run(run, self._client) for run in runs]
        self._draw()

    def _draw(self) -> None:
        typed, options = self.query_one(Input).value.strip(), self.query_one(OptionList)
        found = [offer for offer in self._offers if offer.has(typed)]
        # stable: in order else
        self._found = sorted(found, key=lambda offer: not offer.name.startswith(typed))
        if typed.endswith((".yaml", ".yml")) or "/" in typed:
            self._found.insert(0, _file(typed))
        before = options.highlighted or 0
        options.clear_options()
        options.add_options(Option(offer.shown) for offer in self._found)
        options.highlighted = min(before, len(self._found) - 1) if self._found else None

    def _tell(self, error: LoradError) -> None:
        text = f"✖ {one_line(error.in_full)}"
        self.query_one("#wrong", Static).update(Text(text, style="bold red"))

    @work(exclusive=True)
    async def choose(self, offer: _Offer) -> None:
        try:
            self.dismiss(await asyncio.to_thread(offer.load))
        except LoradError as error:
            self._tell(error)

    def on_input_changed(self) -> None:
        self.query_one("#wrong", Static).update("")
        self.query_one(OptionList).highlighted = None
        self._draw()

    def on_input_submitted(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None and at < len(self._found):
            self.choose(self._found[at])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.choose(self._found[event.option_index])

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        if self._found:
            options.highlighted = min(max((options.highlighted or 0) + by, 0), len(self._found) - 1)

    def action_cancel(self) -> None:
        self.dismiss(None)


def _template(name: str) -> _Offer:
    says = TEMPLATES[name].says
    shown = Text.assemble(
        "template ", (name.ljust(14), "bold"), f"  {says}", no_wrap=True, overflow="ellipsis"
    )
    return _Offer(name, shown, _words(f"template {name} {says}"), lambda: sources.of_template(name))


def _file(name: str) -> _Offer:
    shown = Text.assemble("file     ", (one_line(name), "bold"), no_wrap=True, overflow="ellipsis")
    return _Offer(name, shown, _words(f"file {name}"), lambda: sources.of_file(Path(name)))


def _run(run: Run, client: Client) -> _Offer:
    shown = Text.assemble(
        *("run      ", (one_line(run.name).ljust(14), "bold"), "  ", state_text(run)),
        f"  {steps_in_words(run)}  {eval_text(run)}  {coarse_age(run.created_at)}",
        no_wrap=True,
        overflow="ellipsis",
    )
    has = _words(f"run {run.name} {run.state} {run.reason or ''} {run.owner}")
    return _Offer(run.name, shown, has, lambda: sources.of_run(client.show(run.name)))


def _words(text: str) -> Callable[[str], bool]:
    return lambda typed: all(word in text.lower() for word in typed.lower().split())
