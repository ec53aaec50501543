"""The samples of a run, step by step: prompts or samples on the left, one of them in full on the right."""

import asyncio
import shlex
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Input
from textual.worker import get_current_worker

from lorad.client.choice import HINT, Choice, ordered_by
from lorad.client.client import Client
from lorad.errors import LoradError, SpecError
from lorad.records.runs import RunDetails
from lorad.text import printable
from lorad.tui.actions.table import bindings, opens
from lorad.tui.feed import Changes
from lorad.tui.samples import offers
from lorad.tui.samples.groups import HITS, ORDERS, Group, Hit, hits, selected
from lorad.tui.samples.look import CHANCES_SAY, Look, chances
from lorad.tui.samples.other_steps import PromptFinder, SideBySide, ThisPrompt, compared, history
from lorad.tui.samples.prompt_rows import SampleRows, columns, head, rows, sample_key
from lorad.tui.samples.reading import LIMIT, Step, StepReading
from lorad.tui.samples.text import alone, scale
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.picker import Choose
from lorad.tui.widgets.table import Rows
from lorad.tui.widgets.text_view import Reader, Span, TextBlock, TextSection

_HIT = "underline yellow"  # what a search found
_CURRENT_HIT = "bold reverse yellow"  # where `n` led
_LISTED = 1000  # runs that are offered
_ASKED = {
    "search": "search prompts and completions; nothing: no search",
    "filter": f"{HINT}; nothing: all",
    "step": "a step's number; nothing: the latest, and those to come",
    "other": "compare with which step? nothing: the nearest one with that prompt",
}


class _Beside(NamedTuple):
    """What the prompt is shown beside.

    step: the number of the other step; None: the nearest one that has the prompt.
    run: the name of another run; "": this one.
    is_history: it is shown at all evaluations.
    """

    step: int | None = None
    run: str = ""
    is_history: bool = False


class SamplesTab(RunTab):
    TITLE = "samples"
    BINDINGS = bindings("samples")
    SCOPED_CSS = False  # it goes by the size of the screen
    DEFAULT_CSS = """
    SamplesTab { height: 1fr; }
    SamplesTab #samples-head { height: auto; max-height: 2; padding: 0 1; }
    SamplesTab #samples-panes { height: 1fr; }
    SamplesTab Rows { width: 2fr; min-width: 26; max-width: 76; height: 100%; background: $background; }
    SamplesTab Reader { width: 3fr; height: 100%; border-left: solid $primary; }
    SamplesTab Reader:focus { border-left: outer $accent; }
    SamplesTab #samples-input { display: none; height: 1; padding: 0 1; }
    .-narrow SamplesTab #samples-panes { layout: vertical; }
    .-narrow SamplesTab Rows { width: 100%; max-width: 100%; height: 1fr; }
    .-narrow SamplesTab Reader { width: 100%; height: 2fr; border-left: none; }
    .-narrow SamplesTab Reader:focus { border-left: outer $accent; }
    .-short SamplesTab #samples-head { max-height: 1; }
    .-short SamplesTab Rows { min-height: 2; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._head = Line(id="samples-head")
        self._input = Input(id="samples-input", compact=True)
        self._prompts = Rows(columns([], of_samples=False), id="samples-groups")
        self._all = Rows(columns([], of_samples=True), id="samples-all")
        self._text = Reader(id="samples-text")
        self._all.display = False
        self._reading = StepReading()
        self._set = ""  # of an evaluation; "": training
        self._asked_step: int | None = None  # None: the latest
        self._step = Step(-1, 0, 0, [])
        self._scale = scale([])
        self._where = ""  # the filter
        self._shown: list[Group] = []  # what it leaves
        self._rows = SampleRows([], {})
        self._by = ORDERS[0]
        self._drawn: tuple[Any, ...] = ()  # what the text was drawn from
        self._needle = ""
        self._hits: list[Hit] = []
        self._hit = -1  # the current one, by its place
        self._look = Look()
        self._beside: _Beside | None = None
        self._word_by_word = False
        self._sides = SideBySide("", [])
        self._finders = dict[tuple[str, str], PromptFinder]()
        self._asks = ""
        self._at = ""  # the prompt that the cursor was at last, also while a step has none

    def compose(self) -> ComposeResult:
        yield self._head
        with Horizontal(id="samples-panes"):
            yield self._prompts
            yield self._all
            yield self._text
        yield self._input

    # -- what is read ----------------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes, run: RunDetails) -> Step | None:
        return self._reading.read(client, changes, run, self._set, self._asked_step)

    def show(self, data: Step) -> None:
        before = self._step
        self._step = data
        if data.groups is before.groups:
            self._draw_head()
            return
        if data.attempt != before.attempt:
            self._finders.clear()
        self._scale = scale(data.groups)
        at = self._at
        self._filter()
        if not before.groups and (group := next((group for group in self._shown if group.id == at), None)):
            self._go_to(group)

    def command(self) -> str:
        parts = ["lorad samples", shlex.quote(self.run_name)]
        parts += [f"--eval {shlex.quote(self._set)}"] if self._set else []
        if self._beside is not None and self._beside.is_history:
            return " ".join([*parts, f"--prompt {(self.group and self.group.problem) or 1}"])
        if self._beside is not None and self._sides.options and self.group is not None:
            number = self.group.problem or self.group.rank + 1
            other = [parts[0], shlex.quote(self._beside.run or self.run_name), *parts[2:]]
            step = f"--step {self._step.number} --prompt {number};"
            return " ".join([*parts, step, *other, self._sides.options])
        parts += [] if self._asked_step is None else [f"--step {self._step.number}"]
        by = self._all.by if self._is_flat else ""
        order = ordered_by(by) if by in ORDERS else "drawn"
        parts.append(Choice(self._where, order, order != "drawn" and not self._all.is_reversed).options())
        return " ".join(part for part in parts if part)

    # -- what is drawn ---------------------------------------------------------------------------------------
    @property
    def _is_flat(self) -> bool:
        return bool(self._all.display)

    @property
    def _table(self) -> Rows:
        return self._all if self._is_flat else self._prompts

    @property
    def group(self) -> Group | None:
        """Return the group under the cursor."""
        if self._is_flat:
            place = self._rows.places.get(self._all.key or "")
            return place and place[0]
        return next((group for group in self._shown if group.id == self._prompts.key), None)

    def _go_to(self, group: Group, sample: int = 0) -> None:
        self._table.go(sample_key(group, sample) if self._is_flat else group.id)

    @property
    def _only(self) -> int | None:
        """Return the place of the sample under the cursor in its group; None where the rows are prompts."""
        place = self._rows.places.get(self._all.key or "") if self._is_flat else None
        return place and place[1]

    def _filter(self) -> None:
        self._shown = selected(self._step.groups, Choice(self._where))
        self._prompts.use(columns(self._step.groups, of_samples=False))
        self._all.use(columns(self._step.groups, of_samples=True))
        self._search(self._needle)

    def _draw(self) -> None:
        groups = self._shown
        if self._is_flat:
            counts = Counter((hit.group, hit.sample) for hit in self._hits)
            self._rows = SampleRows(groups, counts)
            self._all.show(self._rows.cells, self._rows.values)
        else:
            by_group = Counter(hit.group for hit in self._hits)
            self._prompts.show_rows(rows(groups, self._scale, by_group))
        self._draw_text()

    def _draw_head(self) -> None:
        more = [f"only {self._where}"] if self._where else []
        more += [f"completions by {self._by}"] if self._by != ORDERS[0] else []
        if self._needle:
            at = f"match {self._hit + 1} of " if self._hit >= 0 else ""
            count = f"{HITS}+" if len(self._hits) == HITS else str(len(self._hits))
            more.append(f"{at}{count} for “{self._needle}” (n, N)")
        if self._beside is not None:
            more.append(f"beside: {self._sides.says or 'looking for that prompt …'}")
        more += [CHANCES_SAY] if self._look.chances is not None else []
        more += [self._table.says] if self._table.says else []
        self._head.say(head(self._step, self._shown, self._asked_step, self._scale, more))

    def on_rows_moved(self, message: Rows.Moved) -> None:
        if message.rows is self._table:
            self._at = self.group.id if self.group else self._at
            self._draw_text()
            self._offer()

    def _offer(self) -> None:
        self.base.offer(self.command(), *self.base.targets("run"))

    def _draw_text(self) -> None:
        """Draw the text, only if it is another one."""
        group = self.group
        step = self._step
        beside = (self._beside, self._word_by_word) if self._beside else None
        of = (step.attempt, step.set, step.number, step.words, self._where)
        drawing = (*of, group and group.id, self._only, self._by, beside, self._look)
        if drawing != self._drawn:
            before = self._drawn
            self._drawn = drawing
            self._sides = SideBySide("", [])
            if group is None:
                none_left = f"No sample of this step is such: {self._where}" if step.groups else step.words
                self._text.show([TextSection([TextBlock(printable(none_left))])])
            elif self._beside is not None:
                self._compare(group, self._beside)
            else:
                if self._look.chances is not None and (group.id, -1) not in self._look.chances:
                    self._read_chances(group)
                text = alone(group, len(step.groups), self._by, self._scale, self._look, self._only)
                is_same = before[:-1] == drawing[:-1]  # only how it is shown is another
                self._text.show(text, stay=is_same)
        self._draw_head()
        self._text.mark(self._marks(group))

    def _marks(self, group: Group | None) -> dict[int, list[Span]]:
        current = self._hits[self._hit] if self._hit >= 0 else None
        marks = dict[int, list[Span]]()
        if self._look.markdown and self._beside is None:
            return marks  # rendered text has other places: see Look.needle
        for hit in self._hits:
            if group is not None and hit.group == group.id:
                marks.setdefault(hit.sample, []).append(
                    (hit.start, hit.end, _CURRENT_HIT if hit is current else _HIT)
                )
        return marks

    # -- which step ------------------------------------------------------------------------------------------
    def action_step(self, by: int) -> None:
        """Go some steps further; past the newest one follow the latest, and those to come."""
        at = self._step.number if self._asked_step is None else self._asked_step
        self._go(self._step.beside(at, by))

    def action_latest(self) -> None:
        self._go(None)

    def _go(self, step: int | None) -> None:
        self._asked_step = step
        self._draw_head()
        self._again()

    def _again(self) -> None:
        self.base.lorad.feed.again()
        self._offer()

    @work
    async def action_source(self) -> None:
        """Ask for training, or for a set of held-out problems."""
        try:
            run = await asyncio.to_thread(self.base.client.show, self.run_name)
        except LoradError as error:
            self.base.say_error(error)
            return
        chosen = await self.app.push_screen_wait(
            Choose("Samples of what?", offers.sources(run), self._set or offers.TRAINING)
        )
        if chosen is not None:
            self._set = "" if chosen == offers.TRAINING else chosen
            self._asked_step = self._beside = None
            self._again()

    # -- which samples ---------------------------------------------------------------------------------------
    def action_flat(self) -> None:
        """Show all samples of the step, or its prompts; the cursor stays with the prompt."""
        group = self.group
        had_focus = self._table.has_focus
        self._prompts.display = self._is_flat
        self._all.display = not self._prompts.display
        self._draw()
        if group is not None:
            self._go_to(group)
        if had_focus:
            self._table.focus()
        self.refresh(layout=True)

    @work
    async def action_choose_filter(self) -> None:
        """Ask which samples, by why they ended, their reward, or that it failed."""
        samples = [sample for group in self._step.groups for sample in group.samples]
        chosen = await self.app.push_screen_wait(
            Choose("Which samples?", offers.filters(samples), self._where)
        )
        if chosen is not None:
            self._choose(chosen)

    def _choose(self, where: str) -> None:
        """Choose samples. Raises SpecError for words that are not understood; then nothing changes."""
        Choice(where).test()
        self._where = where.strip()
        self._filter()
        self._offer()

    # -- search and order ------------------------------------------------------------------------------------
    def _search(self, needle: str) -> None:
        self._needle = needle
        self._hit = -1
        self._hits = hits(self._shown, needle, self._by)
        self._look = self._look._replace(needle=needle)
        self._draw()

    def action_find(self, by: int) -> None:
        """Go to the next match; after the last one comes the first."""
        if not self._hits:
            return
        self._hit = (self._hit + by) % len(self._hits) if self._hit >= 0 or by > 0 else len(self._hits) - 1
        hit = self._hits[self._hit]
        group = next(group for group in self._shown if group.id == hit.group)
        self._go_to(group, max(hit.sample, 0))
        self._draw_text()
        self._text.go(hit.sample, hit.start)

    def action_by(self) -> None:
        self._by = ORDERS[(ORDERS.index(self._by) + 1) % len(ORDERS)]
        self._search(self._needle)

    # -- how it is shown -------------------------------------------------------------------------------------
    def action_unfold(self) -> None:
        self._text.unfold()

    def action_look(self, way: str) -> None:
        """Show special tokens and blanks readable, or Markdown rendered, or the text as it is written."""
        special = way == "special" and not self._look.special
        markdown = way == "markdown" and not self._look.markdown
        self._look = self._look._replace(special=special, markdown=markdown)
        self._text.show_space(special)
        self._draw_text()

    def action_chances(self) -> None:
        self._look = self._look._replace(chances={} if self._look.chances is None else None, markdown=False)
        self._draw_text()

    @work(exclusive=True, group="chances")
    async def _read_chances(self, group: Group) -> None:
        """Read the tokens of one prompt's samples, which are left out elsewhere, and colour them."""
        of = self._step
        ask = self.base.client.samples
        try:
            rows = await asyncio.to_thread(
                ask, self.run_name, step=of.number, limit=LIMIT, eval=of.set or None, prompt_id=group.id
            )
        except LoradError as error:
            self.base.say_error(error)
            return
        by_index = {sample.index: sample for sample in group.samples}
        spans = {
            (group.id, row.index): chances(row, by_index[row.index]) for row in rows if row.index in by_index
        }
        if self._look.chances is not None and of is self._step:
            self._look = self._look._replace(chances={(group.id, -1): [], **spans})
            self._draw_text()

    # -- another step or run beside --------------------------------------------------------------------------
    def _show_beside(self, beside: _Beside | None) -> None:
        self._beside = beside
        self._draw_text()
        self._offer()

    def action_compare(self) -> None:
        self._show_beside(_Beside() if self._beside is None else None)

    def action_words(self) -> None:
        self._word_by_word = not (self._beside and self._word_by_word)
        if self._beside is None or self._beside.is_history:
            self._beside = _Beside()
        self._draw_text()

    def action_history(self) -> None:
        """Show a held-out prompt at all steps, or again at this one alone."""
        was_history = self._beside is not None and self._beside.is_history
        self._show_beside(None if was_history else _Beside(is_history=True))

    @work
    async def action_other_run(self) -> None:
        """Ask for a run whose samples of the same prompt are shown beside these."""
        try:
            runs = await asyncio.to_thread(self.base.client.list, all=True, limit=_LISTED)
        except LoradError as error:
            self.base.say_error(error)
            return
        options = offers.runs(runs, self.run_name)
        chosen = await self.app.push_screen_wait(Choose("Beside the samples of which run?", options))
        if chosen is not None:
            self._show_beside(_Beside(run=chosen))

    @work(exclusive=True, group="compare")
    async def _compare(self, group: Group, beside: _Beside) -> None:
        """Look for the prompt in another step or run, which may take a few seconds, and show both."""
        self._text.show([TextSection([TextBlock("Looking for this prompt …", "dim")])])
        drawing = self._drawn
        worker = get_current_worker()
        client = self.base.client
        run = beside.run or self.run_name
        shown = ThisPrompt(self._step.number, group, self._scale)
        finder = PromptFinder(client, run, self._set, is_other=bool(beside.run))
        finder = self._finders.setdefault((run, self._set), finder)
        try:
            if beside.is_history:
                sides = await asyncio.to_thread(history, client, run, self._set, shown, self._look)
            else:
                ask = partial(compared, finder, shown, beside.step, self._by, lambda: worker.is_cancelled)
                sides = await asyncio.to_thread(ask, word_by_word=self._word_by_word)
        except LoradError as error:
            sides = SideBySide("nothing", [TextSection([TextBlock(printable(error.in_full))])])
        if drawing == self._drawn:
            self._sides = sides
            self._text.show(sides.sections)
            self._draw_head()
            self._offer()
            self._text.mark(self._marks(group))

    # -- keys ------------------------------------------------------------------------------------------------
    def on_rows_selected(self) -> None:
        self._text.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave keys that have nothing to do here to the screen."""
        if action in ("find", "history"):
            return bool(self._needle if action == "find" else self._set)
        if action == "undo":
            return bool(self._asks or self._text.has_focus or self._beside or self._needle or self._where)
        return opens(self.screen, action)

    def action_undo(self) -> None:
        """Leave the field, the text, the comparison, the search or the filter: the first that is there."""
        if self._asks:
            self._answered()
        elif self._text.has_focus:
            self._table.focus()
        elif self._beside is not None:
            self.action_compare()
        elif self._needle:
            self._search("")
        else:
            self._choose("")

    def action_ask(self, what: str) -> None:
        """Ask for a line of text, as `_ASKED` says."""
        self._asks = what
        field = self._input
        field.placeholder = _ASKED[what]
        field.restrict = None if what in ("search", "filter") else r"[0-9]{0,7}"
        field.value = {"search": self._needle, "filter": self._where}.get(what, "")
        field.display = True
        self.screen.set_focus(field)

    def _answered(self) -> None:
        self._asks = ""
        self._input.display = False
        self._table.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        what = self._asks
        value = event.value
        if what == "filter":
            try:
                self._choose(value)
            except SpecError as error:
                self.base.say_error(error)
                return
        self._answered()
        if what == "search":
            self._search(value)
            self.action_find(1)
        elif what == "step":
            self._go(int(value) if value else None)
        elif what == "other":
            run = self._beside.run if self._beside else ""
            self._show_beside(_Beside(int(value) if value else None, run))
