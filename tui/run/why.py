"""Why a run does not learn: the findings of `lorad why`, the most likely cause first."""

import shlex

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll

from lorad.client.client import Client
from lorad.records.runs import RunDetails
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes
from lorad.tui.screens.tab import RunTab
from lorad.tui.widgets.line import Line
from lorad.why.finding import Why
from lorad.why.table import explain

_STEPS = 10  # of a run that works, after which it is asked again
_STYLES = {"cause": "bold red", "look": "bold yellow"}


class FindingsScroll(VerticalScroll):
    BINDINGS = bindings("why_text")


class WhyTab(RunTab):
    TITLE = "why"
    DEFAULT_CSS = """
    WhyTab #why-head { height: auto; max-height: 3; padding: 0 1; color: $text-muted; }
    WhyTab FindingsScroll { height: 1fr; padding: 0 1; }
    WhyTab FindingsScroll Line { height: auto; }
    """

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self._at = -_STEPS  # the step that the run was at when it was asked

    def compose(self) -> ComposeResult:
        yield Line(id="why-head")
        with FindingsScroll():
            yield Line(id="why-findings")

    def read(self, client: Client, changes: Changes, run: RunDetails) -> Why | None:
        if not changes.touch(self.run_name, "state") and run.step < self._at + _STEPS:
            return None
        self._at = run.step
        return explain(client, self.run_name)

    def show(self, data: Why) -> None:
        self.query_one("#why-head", Line).say(one_line(f"{data.says} {data.looked}"))
        texts = [
            Text.assemble(
                (f"{finding.severity}  {finding.name}", _STYLES[finding.severity]),
                f"\n{one_line(finding.says)}\n",
                ("try ", "bold"),
                one_line(finding.next),
            )
            for finding in data.findings
        ]
        nothing = Text("Nothing was found that keeps it from learning.")
        self.query_one("#why-findings", Line).say(Text("\n\n").join(texts) if texts else nothing)

    def command(self) -> str:
        return f"lorad why {shlex.quote(self.run_name)}"
