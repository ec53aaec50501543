"""Every key, once, by action id: screens take their bindings from here and the help screen lists them."""

from __future__ import annotations

from textual.binding import Binding, BindingType


def _key(keys: str, action: str, id: str, says: str, *, show: bool = True, display: str | None = None) -> Binding:
    return Binding(keys, action, says, id=id, show=show, key_display=display)


APP: list[BindingType] = [
    _key("question_mark,f1", "help", "app.help", "Help", display="?"),
    _key("q", "quit", "app.quit", "Quit"),
]

RUN: list[BindingType] = [
    _key("p", "act('pause')", "run.pause", "Pause"),
    _key("r", "act('resume')", "run.resume", "Resume"),
    _key("s", "act('stop')", "run.stop", "Stop"),
    _key("x", "act('kill')", "run.kill", "Kill"),
    _key("y", "copy", "run.copy", "Copy command", show=False),
]

TABLE: list[BindingType] = [
    _key("j", "cursor_down", "table.down", "Down", show=False),
    _key("k", "cursor_up", "table.up", "Up", show=False),
    _key("g", "scroll_top", "table.top", "First", show=False),
    _key("G", "scroll_bottom", "table.bottom", "Last", show=False, display="G"),
    _key("enter", "select_cursor", "table.open", "Open"),
]

RUNS: list[BindingType] = [
    _key("slash", "filter", "runs.filter", "Filter", display="/"),
    _key("escape", "unfilter", "runs.unfilter", "Show all again", show=False),
    _key("a", "all", "runs.all", "Old runs too", show=False),
]

RUN_SCREEN: list[BindingType] = [_key("escape", "back", "screen.back", "Back")]

LOG: list[BindingType] = [
    _key("j", "scroll_down", "log.down", "Down", show=False),
    _key("k", "scroll_up", "log.up", "Up", show=False),
    _key("g", "scroll_home", "log.top", "First", show=False),
    _key("G", "scroll_end", "log.bottom", "Last", show=False, display="G"),
]

CONFIRM: list[BindingType] = [
    _key("n,escape", "answer(False)", "confirm.no", "No", display="n"),
    _key("y", "answer(True)", "confirm.yes", "Yes"),
    _key("left,right,h,l", "app.focus_next", "confirm.other", "Other button", show=False),
]

CLOSE: list[BindingType] = [_key("escape,question_mark,q,enter", "app.pop_screen", "help.close", "Close")]

HELP: dict[str, list[BindingType]] = {
    "Everywhere": APP,
    "The run": RUN,
    "The table": TABLE + RUNS,
    "The run's screen": RUN_SCREEN,
}
