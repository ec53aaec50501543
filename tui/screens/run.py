"""One run: its curve, the figures of its last step, its log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.text import Text
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Log

from lorad.client import Client
from lorad.text import duration, one_line, printable, why
from lorad.tui import keys
from lorad.tui.chart import Chart
from lorad.tui.feed import Changes
from lorad.tui.figures import figures
from lorad.tui.reading import RunNews, RunReader
from lorad.tui.rows import bar, eval_text, share, state_text
from lorad.tui.screens.base import Line, RunsBase

Json = dict[str, Any]
RECENT = 30  # steps that the estimate of the time left rests on


class RunLog(Log):
    BINDINGS = keys.LOG


class RunScreen(RunsBase):
    BINDINGS = keys.RUN_SCREEN
    AUTO_FOCUS = "#log"

    def __init__(self, run: str) -> None:
        super().__init__()
        self._of, self._reader = run, RunReader(run)
        self._state = ""
        self._recent: list[Json] = []
        self._checkpoints: list[Json] = []

    def body(self) -> Iterable[Widget]:
        yield Line(id="facts")
        with Horizontal(id="figures"):
            yield Chart(id="chart")
            yield Line(id="metrics")
        yield RunLog(id="log", highlight=False, max_lines=2000)

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#chart").border_title = "reward  (◆ held-out eval)"
        self.query_one("#metrics").border_title = "last step"
        self.query_one("#log").border_title = "log"
        self.offer(self._of)

    def selected(self) -> str:
        return self._of

    def state(self) -> str:
        return self._state

    def read(self, client: Client, changes: Changes) -> RunNews | None:
        return self._reader.read(client, changes)

    def show(self, data: RunNews) -> None:
        """Take in the news, then draw what they touch."""
        if data.reset:
            self._forget()
        self._state = data.run["state"]
        self._checkpoints = self._checkpoints if data.checkpoints is None else data.checkpoints
        self._recent = (self._recent + data.steps)[-RECENT:]
        self._draw_curve(data)
        self._draw_log(data.log)
        self.query_one("#title", Line).say(self._title(data.run))
        self.query_one("#facts", Line).say(self._facts(data.run))
        self.query_one("#metrics", Line).say(figures(self._recent[-1] if self._recent else None))
        if data.more:
            self.lorad.feed.open(self)

    def action_back(self) -> None:
        self.dismiss()

    def _forget(self) -> None:
        self._recent = []
        self.query_one(Chart).clear()
        self.query_one(RunLog).clear()

    def _draw_curve(self, data: RunNews) -> None:
        chart = self.query_one(Chart)
        for step in data.steps:
            chart.series.add(step["step"], step["metrics"].get("reward"))
        marks = [(e["step"], float(e["score"])) for e in data.evals or () if e["score"] is not None]
        if data.evals is not None and marks != chart.marks:
            chart.marks = marks
            chart.refresh()
        elif data.steps:
            chart.refresh()

    def _draw_log(self, text: str) -> None:
        if text:
            log = self.query_one(RunLog)
            lines = printable(text.replace("\r\n", "\n").replace("\r", "\n"))
            log.write(lines, scroll_end=log.is_vertical_scroll_end)

    # -- the head --------------------------------------------------------------------------------------------------
    def _title(self, run: Json) -> Text:
        left = self._time_left(run)
        return Text.assemble(
            (one_line(run["name"]), "bold"),
            "  ",
            state_text(run),
            f"  step {run['step']}/{run['steps']} {bar(share(run), 16)} {share(run):.0%}",
            f"  ETA {duration(left)}" if left is not None else "",
            "  READ-ONLY" if self.lorad.readonly else "",
        )

    def _facts(self, run: Json) -> Text:
        version, saved = run.get("version"), self._checkpoints
        reason = f"{one_line(why(run))}\n" if why(run) else ""
        parts = [
            f"eval {eval_text(run)}" if eval_text(run) else "no eval yet",
            "no version yet" if version is None else f"version @{version}",
            saved_text(saved),
            f"pool {run['pool']}" if run.get("pool") else "no pool",
            f"attempt {run['attempt']}" if run.get("attempt") else "",
            f"by {run.get('owner')}",
        ]
        return Text.assemble((reason, "bold"), one_line(" · ".join(part for part in parts if part)))

    def _time_left(self, run: Json) -> float | None:
        """Seconds, from the pace of the last steps, evals included; None unless it runs."""
        last = [step for step in self._recent if step["attempt"] == run["attempt"]]
        if run["state"] != "running" or len(last) < 2 or last[-1]["step"] == last[0]["step"]:
            return None
        pace = (last[-1]["at"] - last[0]["at"]) / (last[-1]["step"] - last[0]["step"])
        return float(pace * (run["steps"] - run["step"]))


def saved_text(checkpoints: list[Json]) -> str:
    if not checkpoints:
        return "no checkpoint yet"
    newest = max(int(checkpoint["step"]) for checkpoint in checkpoints)
    return f"{len(checkpoints)} checkpoint{'s' * (len(checkpoints) > 1)}, newest at step {newest}"
