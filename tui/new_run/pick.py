"""Picks what a new run starts from: a template, a file, or another run; typing narrows the list."""

import asyncio
import functools
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
from lorad.client.words import evals_in_words, steps_in_words
from lorad.errors import LoradError
from lorad.records.runs import Run
from lorad.spec.templates import TEMPLATES
from lorad.text import coarse_age, one_line
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.run_rows import state_text
from lorad.tui.draft import DraftSource
from lorad.tui.new_run import sources

_RUNS = 300  # of those that ended, the newest


@dataclass(frozen=True)
class _Offer:
    """One thing to start from.

    words: the text in which typed words are looked for.
    load: returns the spec, on a thread.
    """

    name: str
    shown: Text
    words: str
    load: Callable[[], DraftSource]


class Pick(ModalScreen[DraftSource | None]):
    """Returns what was picked, or None if the user left."""

    BINDINGS = bindings("over", "pick")
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
        self._offers = []
        for name, template in TEMPLATES.items():
            shown = Text.assemble("template ", (name.ljust(14), "bold"), f"  {template.says}")
            load = functools.partial(sources.of_template, name)
            self._offers.append(_Offer(name, shown, f"template {name} {template.says}", load))
        self._listed: list[_Offer] = []

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
        """Add files and runs, when they are known."""
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
        typed = self.query_one(Input).value.strip()
        words = typed.lower().split()
        matching = [each for each in self._offers if all(word in each.words.lower() for word in words)]
        # stable: in order else
        self._listed = sorted(matching, key=lambda offer: not offer.name.startswith(typed))
        if typed.endswith((".yaml", ".yml")) or "/" in typed:
            self._listed.insert(0, _file(typed))
        options = self.query_one(OptionList)
        before = options.highlighted or 0
        options.clear_options()
        options.add_options(Option(offer.shown) for offer in self._listed)
        options.highlighted = min(before, len(self._listed) - 1) if self._listed else None

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
        if at is not None and at < len(self._listed):
            self.choose(self._listed[at])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.choose(self._listed[event.option_index])

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        if self._listed:
            options.highlighted = min(max((options.highlighted or 0) + by, 0), len(self._listed) - 1)


def _file(name: str) -> _Offer:
    shown = Text.assemble("file     ", (one_line(name), "bold"))
    return _Offer(name, shown, f"file {name}", lambda: sources.of_file(Path(name)))


def _run(run: Run, client: Client) -> _Offer:
    shown = Text.assemble(
        *("run      ", (one_line(run.name).ljust(14), "bold"), "  ", state_text(run)),
        f"  {steps_in_words(run)}  {evals_in_words(run, '→')}  {coarse_age(run.created_at)}",
    )
    words = f"run {run.name} {run.state} {run.reason or ''} {run.owner}"
    return _Offer(run.name, shown, words, lambda: sources.of_run(client.show(run.name)))
