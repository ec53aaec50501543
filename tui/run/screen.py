"""The screen of one run: a head that describes it, and tabs with everything about it."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.text import Text
from textual.widget import Widget
from textual.widgets import TabbedContent, TabPane

from lorad.client.client import Client
from lorad.client.columns import seconds_left
from lorad.client.words import evals_in_words, likelihood_in_words, share, steps_in_words, why
from lorad.records.runs import Run, RunDetails
from lorad.text import duration, one_line
from lorad.tui.actions.table import bindings
from lorad.tui.curves.tab import CurvesTab
from lorad.tui.dashboard.run_rows import bar, state_text
from lorad.tui.feed import Changes
from lorad.tui.run.checkpoints import CheckpointsTab
from lorad.tui.run.events import EventsTab
from lorad.tui.run.logs import Logs
from lorad.tui.run.spec import SpecTab
from lorad.tui.run.versions import VersionsTab
from lorad.tui.run.why import WhyTab
from lorad.tui.samples.tab import SamplesTab
from lorad.tui.screens.base import Base
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.line import Line

TABS: tuple[type[RunTab], ...] = (
    CurvesTab,
    SamplesTab,
    VersionsTab,
    CheckpointsTab,
    Logs,
    SpecTab,
    EventsTab,
    WhyTab,
)


class _News(NamedTuple):
    """What was read: the run, and the `data` of a tab, None where nothing of it changed."""

    run: RunDetails
    tab: RunTab
    data: Any | None


class Panes(TabbedContent):
    """Tabs whose focus follows the tab, never the reverse: focus may arrive later than the next key."""

    def on_tab_pane_focused(self, event: TabPane.Focused) -> None:
        event.stop()
        event.prevent_default()


class RunScreen(Base):
    DEFAULT_CSS = """
    RunScreen #tabs, RunScreen #tabs ContentSwitcher { height: 1fr; }
    RunScreen Tab:last-child { padding: 0 0 0 1; } /* all fit in 80 columns */
    RunScreen #tabs TabPane { height: 1fr; padding: 0; }
    """
    BINDINGS = bindings("run", "back", "tabs")

    def __init__(self, run: str, others: Sequence[str] = (), tab: str = "") -> None:
        super().__init__()
        self._of = run
        self._others = others
        self._first = tab
        self._run: RunDetails | None = None
        self._tabs = [tab(run) for tab in TABS]
        self._front = self._tabs[0]

    def body(self) -> Iterable[Widget]:
        yield Line(id="facts")
        with Panes(id="tabs"):
            for number, tab in enumerate(self._tabs, 1):
                with TabPane(f"{number} {tab.TITLE}", id=f"pane-{tab.TITLE}"):
                    yield tab

    def on_mount(self) -> None:
        self.query_one(CurvesTab).compare(self._others)
        self._front.focus_first()
        self.show_tab(self._first)

    def show_tab(self, title: str) -> None:
        """Show a tab by its title; "" keeps the tab that is shown."""
        if title:
            self.query_one(TabbedContent).active = f"pane-{title}"

    # -- what is shown ---------------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes) -> _News | None:
        tab = self._front
        run = self._run
        if changes.touch(self._of) or run is None:
            run = client.show(self._of)
        data = tab.read(client, changes, run)
        return _News(run, tab, data) if data is not None or run is not self._run else None

    def show(self, data: _News) -> None:
        self._run = data.run
        run = data.run
        left = seconds_left(run)
        title = Text.assemble((one_line(run.name), "bold"), "  ", state_text(run))
        title.append(f"  step {steps_in_words(run)}")
        title.append(f" {bar(share(run), 16)} {share(run):.0%}" if run.steps else "")
        title.append(f"  ETA {duration(left)}" if left is not None else "")
        self.say_title(title)
        evals = evals_in_words(run, "→")
        parts = [
            f"eval {evals}" if evals else "no eval yet",
            likelihood_in_words(run),
            "no version yet" if run.version is None else f"version @{run.version}",
            f"pool {run.pool}" if run.pool else "no pool",
            f"attempt {run.attempt}" if run.attempt else "",
            f"from {run.origin}" if run.origin else "",
            f"by {run.owner}",
            f"group {run.group}" if run.group else "",
            f"tags {' '.join(run.tags)}" if run.tags else "",
            run.note,
        ]
        reason = f"{one_line(why(run))}\n" if why(run) else ""
        facts = Text.assemble((reason, "bold"), one_line(" · ".join(part for part in parts if part)))
        self.query_one("#facts", Line).say(facts)
        if data.data is not None:
            data.tab.show(data.data)
        self.offer(self._front.command(), *self.targets("run"))

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        pane = event.pane.id or ""
        front = next(tab for tab in self._tabs if pane == f"pane-{tab.TITLE}")
        if front is not self._front:
            self._front = front
            self._acted_on = ()
            self.say_command(front.command())
            self.lorad.feed.open(self)
            front.focus_first()

    # -- what keys act on ------------------------------------------------------------------------------------
    def targets(self, on: str) -> list[str]:
        return [self._of] if on == "run" else self._front.targets(on)

    def preset(self, verb: str, target: str) -> dict[str, str]:
        return self._front.preset(verb, target)

    def run_of(self, target: str) -> Run | None:
        return self._run

    def _subject(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return this run, whatever part of it an action was on."""
        return (self._of,)

    def action_tab(self, by: int) -> None:
        self.show_tab(self._tabs[(self._tabs.index(self._front) + by) % len(self._tabs)].TITLE)

    def action_tab_at(self, number: int) -> None:
        self.show_tab(self._tabs[number - 1].TITLE)
