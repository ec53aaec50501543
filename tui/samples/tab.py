"""The samples of a run, step by step: prompts on the left,
what the model made of one of them on the right.
"""

import asyncio
import shlex
from collections import Counter
from typing import Any, cast

from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Input
from textual.worker import get_current_worker

from lorad.client.client import Client
from lorad.client.shapes import RunDetails
from lorad.errors import DaemonUnreachable, LoradError
from lorad.text import printable
from lorad.tui import keys
from lorad.tui.feed import Changes, Pace
from lorad.tui.port import AppPort
from lorad.tui.samples.groups import HITS, ORDERS, Group, Hit, grouped, hits
from lorad.tui.samples.other_steps import LIMIT, Ask, Here, Lookup, compared
from lorad.tui.samples.prompt_rows import COLUMNS, Step, head, rows, values
from lorad.tui.samples.text import alone, scale
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows
from lorad.tui.widgets.text_view import Block, Reader, Section, Span

_FOUND, _HERE = "underline yellow", "bold reverse yellow"  # what a search found, and where `n` led
_ASKED = {
    "search": "search prompts and completions; nothing: no search",
    "step": "a step's number; nothing: the latest, and those to come",
    "other": "compare with which step? nothing: the nearest one with that prompt",
}


class Samples(RunTab):
    TITLE = "samples"
    BINDINGS = keys.SAMPLES
    SCOPED_CSS = False  # it goes by the size of the screen
    DEFAULT_CSS = """
    Samples { height: 1fr; }
    Samples #samples-head { height: auto; max-height: 2; padding: 0 1; }
    Samples #samples-panes { height: 1fr; }
    Samples Rows { width: 2fr; min-width: 26; max-width: 76; height: 100%; background: $background; }
    Samples Reader { width: 3fr; height: 100%; border-left: solid $primary; }
    Samples Reader:focus { border-left: outer $accent; }
    Samples #samples-input { display: none; height: 1; padding: 0 1; }
    .-narrow Samples #samples-panes { layout: vertical; }
    .-narrow Samples Rows { width: 100%; max-width: 100%; height: 1fr; }
    .-narrow Samples Reader { width: 100%; height: 2fr; border-left: none; }
    .-narrow Samples Reader:focus { border-left: outer $accent; }
    .-short Samples #samples-head { max-height: 1; }
    .-short Samples Rows { min-height: 2; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._head, self._input = Line(id="samples-head"), Input(id="samples-input", compact=True)
        self._table, self._text = Rows(COLUMNS, id="samples-groups"), Reader(id="samples-text")
        self._wanted: int | None = None  # a step; None: the latest
        self._had: Step | None = None  # what was read last
        self._pace = Pace()
        self._step, self._scale = Step(0, 0, 0, []), scale([])
        self._by, self._drawn = ORDERS[0], cast("tuple[Any, ...]", ())
        self._needle, self._hits, self._hit = "", cast("list[Hit]", []), -1
        self._is_beside, self._beside_step, self._word_by_word = False, cast("int | None", None), False
        self._beside_says, self._lookup = "", cast("Lookup | None", None)
        self._asks = ""

    def compose(self) -> ComposeResult:
        yield self._head
        with Horizontal(id="samples-panes"):
            yield self._table
            yield self._text
        yield self._input

    # -- what is read ----------------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes, run: RunDetails) -> Step | None:
        """Once for each attempt and step: samples never change."""
        wanted, newest, attempt = self._wanted, run.step, run.attempt
        at = newest if wanted is None else wanted
        had = self._had
        if (
            had is not None
            and (had.attempt, had.number) == (attempt, at)
            and (had.groups or not changes.everything)
        ):
            self._had = had if had.newest == newest else had._replace(newest=newest)
            return None if self._had is had else self._had
        if had is not None and wanted is None and not self._pace.is_due:
            return None
        groups, words = list[Group](), "No samples yet: the first step has not ended."
        try:
            with self._pace.asking():
                groups = grouped(client.samples(self.run_name, step=at, limit=LIMIT)) if at else []
            words = f"Step {at} has no samples." if at else words
        except DaemonUnreachable:
            raise
        except LoradError as error:
            words = f"{error.message} {error.hint}"
        self._had = Step(at, newest, attempt, groups, "" if groups else words)
        return self._had

    def show(self, data: Step) -> None:
        before, self._step = self._step, data
        if data.groups is before.groups:
            self._draw_head()
            return
        if data.attempt != before.attempt:
            self._lookup = None
        self._scale = scale(data.groups)
        self._search(self._needle)

    def command(self) -> str:
        step = "" if self._wanted is None else f" --step {self._wanted}"
        return f"lorad samples {shlex.quote(self.run_name)}{step}"

    # -- what is drawn ---------------------------------------------------------------------------------------
    @property
    def group(self) -> Group | None:
        """Under the cursor."""
        return next((group for group in self._step.groups if group.id == self._table.key), None)

    def _draw(self) -> None:
        found = Counter(hit.group for hit in self._hits)
        groups = self._step.groups
        self._table.show(rows(groups, self._scale, found), {group.id: values(group) for group in groups})
        self._draw_text()

    def _draw_head(self) -> None:
        more = [f"completions by {self._by}"] if self._by != ORDERS[0] else []
        if self._needle:
            at = f"match {self._hit + 1} of " if self._hit >= 0 else ""
            count = f"{HITS}+" if len(self._hits) == HITS else str(len(self._hits))
            more.append(f"{at}{count} for “{self._needle}” (n, N)")
        if self._is_beside:
            more.append(f"beside: {self._beside_says or 'looking for that prompt …'}")
        self._head.say(head(self._step, self._wanted, self._scale, more))

    def on_rows_moved(self) -> None:
        self._draw_text()

    def _draw_text(self) -> None:
        """Draw the text, only if it is another one."""
        group, step = self.group, self._step
        beside = (self._beside_step, self._word_by_word) if self._is_beside else None
        wanted = (step.attempt, step.number, step.words, group and group.id, self._by, beside)
        if wanted != self._drawn:
            self._drawn, self._beside_says = wanted, ""
            if group is None:
                self._text.show([Section([Block(printable(step.words))])])
            elif self._is_beside:
                self._compare(group)
            else:
                self._text.show(alone(group, len(step.groups), self._by, self._scale))
        self._draw_head()
        self._text.mark(self._marks(group))

    def _marks(self, group: Group | None) -> dict[int, list[Span]]:
        here = self._hits[self._hit] if self._hit >= 0 else None
        marks = dict[int, list[Span]]()
        for hit in self._hits:
            if group is not None and hit.group == group.id:
                marks.setdefault(hit.sample, []).append(
                    (hit.start, hit.end, _HERE if hit is here else _FOUND)
                )
        return marks

    # -- which step ------------------------------------------------------------------------------------------
    def action_step(self, by: int) -> None:
        """Past the newest one is the latest, and those to come."""
        at = max((self._wanted or self._step.number) + by, 1)
        self._go(at if at <= self._step.newest else None)

    def action_latest(self) -> None:
        self._go(None)

    def _go(self, step: int | None) -> None:
        self._wanted = step
        self._draw_head()
        self.lorad.feed.again()

    @property
    def lorad(self) -> AppPort:
        return cast(AppPort, self.app)

    # -- search and order ------------------------------------------------------------------------------------
    def _search(self, needle: str) -> None:
        self._needle, self._hit = needle, -1
        self._hits = hits(self._step.groups, needle, self._by)
        self._draw()

    def action_find(self, by: int) -> None:
        """Go to the next match; after the last one comes the first."""
        if not self._hits:
            return
        self._hit = (self._hit + by) % len(self._hits) if self._hit >= 0 or by > 0 else len(self._hits) - 1
        hit = self._hits[self._hit]
        self._table.go(hit.group)
        self._draw_text()
        self._text.go(hit.sample, hit.start)

    def action_by(self) -> None:
        self._by = ORDERS[(ORDERS.index(self._by) + 1) % len(ORDERS)]
        self._search(self._needle)

    def action_unfold(self) -> None:
        self._text.unfold()

    # -- another step beside ---------------------------------------------------------------------------------
    def action_compare(self) -> None:
        self._is_beside, self._beside_step = not self._is_beside, None
        self._draw_text()

    def action_words(self) -> None:
        self._word_by_word = not (self._is_beside and self._word_by_word)
        self._is_beside = True
        self._draw_text()

    @work(exclusive=True, group="compare")
    async def _compare(self, group: Group) -> None:
        """Look for the prompt in another step, which may take a few seconds, and show both."""
        self._text.show([Section([Block("Looking for this prompt in another step …", "dim")])])
        wanted, worker = self._drawn, get_current_worker()
        lookup = self._lookup = self._lookup or Lookup(self.lorad.client, self.run_name)
        here = Here(self._step.number, self._step.newest, group, self._scale)
        ask = Ask(self._beside_step, self._by, self._word_by_word)
        try:
            says, sections = await asyncio.to_thread(compared, lookup, here, ask, lambda: worker.is_cancelled)
        except LoradError as error:
            says, sections = "nothing", [Section([Block(printable(f"{error.message} {error.hint}"))])]
        if wanted == self._drawn:
            self._beside_says = says
            self._text.show(sections)
            self._draw_head()
            self._text.mark(self._marks(group))

    # -- keys ------------------------------------------------------------------------------------------------
    def on_rows_selected(self) -> None:
        self._text.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that have nothing to do here are those of the screen."""
        if action == "find":
            return bool(self._needle)
        return self._is_to_undo if action == "undo" else keys.opens(self.screen, action)

    @property
    def _is_to_undo(self) -> bool:
        return bool(self._asks or self._text.has_focus or self._is_beside or self._needle)

    def action_undo(self) -> None:
        """The last thing first."""
        if self._asks:
            self._answered()
        elif self._text.has_focus:
            self._table.focus()
        elif self._is_beside:
            self.action_compare()
        else:
            self._search("")

    def action_ask(self, what: str) -> None:
        """Ask for a line of text; see ASKED."""
        self._asks, asked = what, self._input
        asked.placeholder, asked.restrict = _ASKED[what], None if what == "search" else r"[0-9]{0,7}"
        asked.value, asked.display = self._needle if what == "search" else "", True
        self.screen.set_focus(asked)

    def _answered(self) -> None:
        self._asks, self._input.display = "", False
        self._table.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        what, value = self._asks, event.value
        self._answered()
        if what == "search":
            self._search(value)
            self.action_find(1)
        elif what == "step":
            self._go(max(int(value), 1) if value else None)
        else:
            self._is_beside, self._beside_step = True, int(value) if value else None
            self._draw_text()
