"""Every key, once, by action id: screens take their bindings from here, the help screen lists them, and
`tui.keymap` of config.yaml gives an id other keys.

No key that changes something (`screen.act`) is one shift away from another key of the same view: a slip never
acts on a run.
"""

from collections.abc import Iterable
from typing import Any

from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input


def _key(
    keys: str, action: str, id: str, says: str, *, show: bool = True, display: str | None = None
) -> Binding:
    return Binding(keys, action, says, id=id, show=show, key_display=display)


_PROMPTS = ("filter", "search", "ask", "compare")


def _prompt(keys: str, action: str, id: str, says: str, display: str) -> Binding:
    """Make the binding of a key that opens a field.

    It is handled before what is focused gets the key, so that what is typed next, however soon, is the
    field's; but not while a field is typed in, see `opens`.
    """
    return Binding(keys, action, says, id=id, key_display=display, priority=True)


def opens(screen: Screen[Any], action: str) -> bool:
    """Whether the action of a `_prompt` is possible now."""
    return not (action in _PROMPTS and isinstance(screen.focused, Input))


# What the line at the bottom leaves out last, and what it leaves out first.
ALWAYS = frozenset({"run.kill", "screen.back", "form.back", "app.help", "app.quit"})
SPARE = frozenset({"screen.new", "screen.serving"})

APP: list[BindingType] = [
    _key("question_mark,f1", "help", "app.help", "Help"),
    _key("colon", "command_line", "app.command", "Commands", show=False, display=":"),
    _key("ctrl+p", "command_palette", "app.palette", "Find an action or a setting", show=False),
    _key("H", "freeze", "app.freeze", "Hold what is shown, or refresh it again", show=False),
    _key("T", "next_theme", "app.theme", "Next theme", show=False),
    _key("q", "quit", "app.quit", "Quit"),
]

SCREEN: list[BindingType] = [
    _key("y", "copy", "screen.copy", "Copy the command", show=False),
    _key("n", "open('form')", "screen.new", "New run"),
    _key("M", "open('serving')", "screen.serving", "Serving"),
]

RUN: list[BindingType] = [
    _key("P", "screen.act('pause')", "run.pause", "Pause"),
    _key("r", "screen.act('resume')", "run.resume", "Resume"),
    _key("s", "screen.act('stop')", "run.stop", "Stop"),
    _key("x", "screen.act('kill')", "run.kill", "Kill"),
    _key("ctrl+d", "screen.act('rm')", "run.rm", "Delete", show=False),
]

VERSION: list[BindingType] = [
    _key("i", "screen.act('pin')", "version.pin", "Pin"),
    _key("u", "screen.act('unpin')", "version.unpin", "Unpin"),
    _key("w", "screen.act('swap')", "version.swap", "Swap"),
    _key("f", "screen.act('fork')", "version.fork", "Fork"),
    _key("e", "screen.act('export')", "version.export", "Export", show=False),
]

ALIAS: list[BindingType] = [
    _key("w", "screen.act('move')", "alias.move", "Swap"),
    _key("b", "screen.act('rollback')", "alias.rollback", "Roll back"),
    _key("ctrl+d", "screen.act('unalias')", "alias.rm", "Remove"),
]

POOL: list[BindingType] = [_key("E", "screen.act('end')", "pool.end", "End the pool", show=False)]

BILL: list[BindingType] = [
    _key("b", "by(1)", "bill.by", "By what"),
    _key("v", "since(1)", "bill.since", "Since when"),
    _key("V", "since(-1)", "bill.since_before", "Since when, the other way round", show=False),
]

NODES: list[BindingType] = [_key("l", "pool", "nodes.pool", "Its pool")]

BOXES: list[BindingType] = [_key("a", "open('all')", "boxes.all", "Runs of all")]

DEVICE: list[BindingType] = [_key("l", "pool", "device.pool", "Its pool")]

POOL_SCREEN: list[BindingType] = [
    _key("tab", "app.focus_next", "pool.next", "The slots, or the log", show=False),
]

TABLE: list[BindingType] = [
    _key("j", "move(1)", "table.down", "Down", show=False),
    _key("k", "move(-1)", "table.up", "Up", show=False),
    _key("g", "move_to(0)", "table.top", "First", show=False),
    _key("G", "move_to(-1)", "table.bottom", "Last", show=False),
    _key("pagedown", "move_screens(1)", "table.page_down", "A screen down", show=False),
    _key("pageup", "move_screens(-1)", "table.page_up", "A screen up", show=False),
    _key("space", "mark", "table.mark", "Mark", show=False),
    _key("o", "order", "table.order", "Order by the next column", show=False),
    _key("O", "reverse", "table.reverse", "Order the other way round", show=False),
    _key("enter", "select_cursor", "table.open", "Open", show=False),
]

BOARD: list[BindingType] = [
    _prompt("slash", "filter", "board.filter", "Filter", "/"),
    _key("escape", "unfilter", "board.unfilter", "Show all, mark none", show=False),
    _key("a", "all", "board.all", "Old runs too", show=False),
    _key("z", "acknowledge", "board.acknowledge", "Acknowledge alarms of ended runs", show=False),
    _key("c", "columns", "board.columns", "Columns"),
    _key("f", "fold", "board.fold", "Open the sweep, or fold it into one row", show=False),
    _key("F", "fold_all", "board.fold_all", "Open all sweeps, or fold all", show=False),
    _key("B", "open('bill')", "board.bill", "The bill", show=False),
    _key("b", "open('boxes')", "board.boxes", "All boxes, and which is shown", show=False),
    _key("N", "open('nodes')", "board.nodes", "The nodes of a cluster", show=False),
    _key("l", "pool", "board.pool", "The pool of the run", show=False),
    _key("exclamation_mark", "next_alarm", "board.alarm", "Next run with an alarm", show=False, display="!"),
    _key("tab", "app.focus_next", "board.next", "Next pane", show=False),
    _key("shift+tab", "app.focus_previous", "board.previous", "Pane before", show=False),
]

BACK: list[BindingType] = [_key("escape", "back", "screen.back", "Back")]

TABS: list[BindingType] = [
    _key("right_square_bracket", "tab(1)", "tabs.next", "Next tab", show=False, display="]"),
    _key("left_square_bracket", "tab(-1)", "tabs.previous", "Previous tab", show=False, display="["),
    *(_key(str(n), f"tab_at({n})", f"tabs.{n}", f"Tab {n}", show=False) for n in range(1, 9)),
]

LOG: list[BindingType] = [
    _key("j", "scroll_down", "log.down", "Down", show=False),
    _key("k", "scroll_up", "log.up", "Up", show=False),
    _key("g", "scroll_home", "log.top", "First", show=False),
    _key("G", "scroll_end", "log.bottom", "Last", show=False),
]

CURVES: list[BindingType] = [
    _key("left", "cursor(-1)", "curves.back", "A step back", show=False),
    _key("right", "cursor(1)", "curves.on", "A step on", show=False),
    _key("shift+left", "cursor(-10)", "curves.back_far", "Ten steps back", show=False),
    _key("shift+right", "cursor(10)", "curves.on_far", "Ten steps on", show=False),
    _key("home", "cursor_to(0)", "curves.first", "The first step", show=False),
    _key("end", "cursor_to(-1)", "curves.last", "The last step, and follow it", show=False),
    _key("j,down", "metric(1)", "curves.next", "Next metric", show=False),
    _key("k,up", "metric(-1)", "curves.previous", "Metric before", show=False),
    _key("enter", "alone", "curves.alone", "This chart alone, or all", show=False),
    _key("m", "choose_metric", "curves.metric", "Metric"),
    _key("a", "compare", "curves.compare", "Compare"),
    _key("A", "uncompare", "curves.uncompare", "No other runs", show=False),
    _key("e", "look('smooth')", "curves.smooth", "Smooth: EMA 0, 0.6, 0.9, 0.97", show=False),
    _key("L", "look('log')", "curves.log", "Logarithmic, or not", show=False),
    _key("c", "look('spikes')", "curves.spikes", "Spikes within, or cut", show=False),
    _key("b", "look('best')", "curves.best", "Mark the best, or not", show=False),
    _key("u", "look('x')", "curves.axis", "X by steps, tokens or time", show=False),
    _key("D", "hide", "curves.hide", "No chart of this metric", show=False),
    _key("E", "export", "curves.export", "Export as PNG, SVG or CSV", show=False),
    _key("plus,equals_sign", "zoom(0.5)", "curves.in", "Zoom", display="+"),
    _key("minus", "zoom(2)", "curves.out", "Zoom out", show=False, display="-"),
    _key("0", "zoom(0)", "curves.whole", "All steps", show=False),
    _key("h", "move(-0.25)", "curves.left", "Earlier steps", show=False),
    _key("l", "move(0.25)", "curves.right", "Later steps", show=False),
    _key("t", "tail", "curves.tail", "The last 1000, 200, 50 steps, or all", show=False),
    _key("f", "figures", "curves.figures", "The table of figures, or not", show=False),
]

# On screens over another one, which the keys of the application do not reach.
OVER: list[BindingType] = [_key("question_mark,f1", "app.help", "over.help", "Help", show=False)]

CHOOSE: list[BindingType] = [
    _key("escape", "dismiss", "choose.cancel", "Cancel"),
    _key("down", "go(1)", "choose.down", "Down", show=False),
    _key("up", "go(-1)", "choose.up", "Up", show=False),
]

COLUMNS: list[BindingType] = [
    _key("escape", "dismiss", "columns.cancel", "As before"),
    # Before what is focused gets them: no column has a blank, and `enter` is not the field's.
    Binding("space", "show_or_not", "Shown, or not", id="columns.toggle", priority=True),
    Binding("enter", "done", "Done", id="columns.done", priority=True),
    Binding("shift+up", "shift(-1)", "Further to the left", id="columns.left", show=False, priority=True),
    Binding("shift+down", "shift(1)", "Further to the right", id="columns.right", show=False, priority=True),
    Binding("ctrl+r", "usual", "The usual ones", id="columns.usual", show=False, priority=True),
    _key("down", "go(1)", "columns.down", "Down", show=False),
    _key("up", "go(-1)", "columns.up", "Up", show=False),
]

CONFIRM: list[BindingType] = [
    _key("n,escape", "dismiss(False)", "confirm.no", "No", display="n"),
    _key("y", "dismiss(True)", "confirm.yes", "Yes"),
    _key("left,right,h,l", "app.focus_next", "confirm.other", "Other button", show=False),
    _key("down,j", "scroll(1)", "confirm.down", "Down", show=False),
    _key("up,k", "scroll(-1)", "confirm.up", "Up", show=False),
]

ASK: list[BindingType] = [
    _key("escape", "dismiss", "ask.cancel", "Cancel"),
    _key("ctrl+s", "go", "ask.go", "Do it"),
    # Before what is focused gets them: what is typed next, however soon, is the next field's.
    Binding("down", "app.focus_next", "Next field", id="ask.next", show=False, priority=True),
    Binding("up", "app.focus_previous", "Previous field", id="ask.previous", show=False, priority=True),
]

CLOSE: list[BindingType] = [
    _prompt("slash", "search", "help.search", "Search", "/"),
    _key("escape", "back", "help.back", "No search, or close", show=False),
    _key("question_mark,f1,q,enter", "app.pop_screen", "help.close", "Close"),
    _key("j,down", "scroll(1)", "help.down", "Down", show=False),
    _key("k,up", "scroll(-1)", "help.up", "Up", show=False),
]

CHOICE: list[BindingType] = [
    _key("right,space", "turn(1)", "choice.next", "Next choice", show=False),
    _key("left", "turn(-1)", "choice.previous", "Previous choice", show=False),
]

FORM: list[BindingType] = [
    _key("ctrl+s", "start", "form.start", "Start"),
    _key("ctrl+o", "write", "form.write", "Write"),
    _key("ctrl+t", "flip", "form.flip", "YAML"),
    _key("ctrl+y", "copy", "form.copy", "Copy the command", show=False),
    # Before what is focused gets them: what is typed next, however soon, is the next field's.
    Binding("enter,down", "move(1)", "Next field", id="form.next", show=False, priority=True),
    Binding("up", "move(-1)", "Previous field", id="form.previous", show=False, priority=True),
    Binding("tab", "app.focus_next", "Next field, or the YAML", id="form.tab", show=False, priority=True),
    Binding(
        "shift+tab", "app.focus_previous", "The one before", id="form.back_tab", show=False, priority=True
    ),
    _key("escape,q", "back", "form.back", "Back", display="esc"),
]

LINE: list[BindingType] = [
    _key("escape", "dismiss", "line.cancel", "Close"),
    # Before the field gets them.
    Binding("tab", "complete(1)", "Complete, again: the next", id="line.next", show=False, priority=True),
    Binding(
        "shift+tab", "complete(-1)", "The candidate before", id="line.previous", show=False, priority=True
    ),
    Binding("up", "recall(-1)", "The line before", id="line.before", show=False, priority=True),
    Binding("down", "recall(1)", "The line after", id="line.after", show=False, priority=True),
]

PICK: list[BindingType] = [
    _key("down", "move(1)", "pick.down", "Down", show=False),
    _key("up", "move(-1)", "pick.up", "Up", show=False),
    _key("pagedown", "move(10)", "pick.page_down", "Ten down", show=False),
    _key("pageup", "move(-10)", "pick.page_up", "Ten up", show=False),
    _key("escape", "dismiss", "pick.cancel", "Cancel"),
]

SPEC: list[BindingType] = [
    _prompt("d", "ask('other')", "spec.diff", "Compare", "d"),
    _key("a", "all", "spec.all", "Defaults too"),
    _prompt("slash", "ask('search')", "spec.search", "Search", "/"),
    _key("Y", "copy_yaml", "spec.copy", "Copy the YAML"),
    _key("L", "like", "spec.like", "New run like it"),
]

SPEC_TEXT: list[BindingType] = [
    _key("j", "scroll_down", "spec.down", "Down", show=False),
    _key("k", "scroll_up", "spec.up", "Up", show=False),
    _key("g", "scroll_home", "spec.top", "First", show=False),
    _key("G", "scroll_end", "spec.bottom", "Last", show=False),
]

WHY_TEXT: list[BindingType] = [
    _key("j", "scroll_down", "why.down", "Down", show=False),
    _key("k", "scroll_up", "why.up", "Up", show=False),
    _key("g", "scroll_home", "why.top", "First", show=False),
    _key("G", "scroll_end", "why.bottom", "Last", show=False),
]

SAMPLES: list[BindingType] = [
    _key("less_than_sign,comma", "step(-1)", "samples.earlier", "Earlier step", display="<"),
    _key("greater_than_sign,full_stop", "step(1)", "samples.later", "Later step", display=">"),
    _prompt("number_sign", "ask('step')", "samples.jump", "Step …", "#"),
    _key("l", "latest", "samples.latest", "Latest", show=False),
    _prompt("slash", "ask('search')", "samples.search", "Search", "/"),
    _key("n", "find(1)", "samples.next", "Next match", show=False),
    _key("N", "find(-1)", "samples.previous", "Match before", show=False),
    _prompt("f", "ask('filter')", "samples.filter", "Filter", "f"),
    _key(
        "e",
        "choose_filter",
        "samples.ends",
        "Histogram of rewards and lengths; which samples",
        show=False,
    ),
    _key("a", "flat", "samples.all", "All samples, or prompts", show=False),
    _key("t", "source", "samples.source", "Training or eval"),
    _key("h", "history", "samples.history", "A held-out prompt at all steps", show=False),
    _key("v", "by", "samples.order", "Order of the completions", show=False),
    _key("d", "compare", "samples.diff", "Compare"),
    _key("b", "other_run", "samples.run", "Beside another run", show=False),
    _key("equals_sign", "ask('other')", "samples.other", "Compare with step …", show=False, display="="),
    _key("w", "words", "samples.words", "Word by word, or side by side", show=False),
    _key("z", "unfold", "samples.unfold", "Long prompts, answers and calls whole, or folded", show=False),
    _key("i", "look('special')", "samples.special", "Special tokens and blanks, or not", show=False),
    _key("c", "chances", "samples.chances", "Tokens coloured by their probability", show=False),
    _key("m", "look('markdown')", "samples.markdown", "Markdown rendered, or as written", show=False),
    _key("escape", "undo", "samples.undo", "Leave the text, the comparison, search, filter", show=False),
]

VERSIONS_TAB: list[BindingType] = [
    _key("c", "current", "versions.current", "Current one"),
]

CHECKPOINTS: list[BindingType] = [
    _key("r", "screen.act('resume')", "checkpoints.resume", "Resume from it"),
    _key("f", "screen.act('fork')", "checkpoints.fork", "Fork its version"),
]

PROMPT: list[BindingType] = [_key("escape", "close", "prompt.close", "Close", show=False)]

LOGS: list[BindingType] = [
    _prompt("slash", "filter", "logs.filter", "Filter", "/"),
    _key("escape", "unfilter", "logs.unfilter", "All lines", show=False),
    _key("o", "turn(1)", "logs.next", "Next process"),
    _key("O", "turn(-1)", "logs.previous", "Process before", show=False),
    _key("f", "follow", "logs.follow", "Follow"),
]

EVENTS: list[BindingType] = [
    _prompt("slash", "filter", "events.filter", "Filter", "/"),
    _key("escape", "unfilter", "events.unfilter", "All events", show=False),
    _key("v", "kind(1)", "events.kind", "Show other kinds"),
    _key("V", "kind(-1)", "events.kind_before", "Show the kind before", show=False),
]

SERVING: list[BindingType] = [_key("c", "chat", "serving.chat", "Chat")]

CHAT: list[BindingType] = [
    _key("escape", "leave", "chat.leave", "Cancel the answer, or go back"),
    _key("up", "recall(-1)", "chat.before", "The prompt before", show=False),
    _key("down", "recall(1)", "chat.next", "The next prompt", show=False),
    _key("pageup", "page(-1)", "chat.page_up", "Answers up", show=False),
    _key("pagedown", "page(1)", "chat.page_down", "Answers down", show=False),
]

# By heading; an id is under one of them alone, by which the help knows what works where.
HELP: dict[str, list[BindingType]] = {
    "Everywhere": APP + SCREEN + BACK,
    "Runs, those that are marked or the one under the cursor": RUN,
    "The dashboard": BOARD,
    "Its columns": COLUMNS,
    "Pools, the one under the cursor": POOL,
    "The screen of a pool": POOL_SCREEN,
    "The screen of a device": DEVICE,
    "The bill": BILL,
    "All boxes": BOXES,
    "Tables": TABLE,
    "The run's screen": TABS,
    "Curves": CURVES,
    "Samples": SAMPLES,
    "Versions": VERSION,
    "The versions of a run": VERSIONS_TAB,
    "Checkpoints": CHECKPOINTS,
    "Aliases": ALIAS + SERVING,
    "The chat": CHAT,
    "Texts": LOG,
    "Logs": LOGS,
    "Events": EVENTS,
    "A new run": FORM + CHOICE,
    "Specs": SPEC + SPEC_TEXT,
    "Why it does not learn": WHY_TEXT,
    "What an action asks for": ASK,
    "A question": CONFIRM,
    "What a new run begins with": PICK,
    "A choice": CHOOSE,
    "The command line": LINE,
    "This help": CLOSE,
}


def ids() -> Iterable[str]:
    """Return the ids that `tui.keymap` may name."""
    return (
        key.id
        for keys in (*HELP.values(), OVER, PROMPT)
        for key in keys
        if isinstance(key, Binding) and key.id
    )
