"""The table of actions: every key, by the view in which it works, what it does, and what is said of it.

Screens take their bindings from here, the footer its keys, the help its lines, the palette and the line what
they offer; `tui.keymap` of config.yaml gives an id other keys.

No key that changes something (`VerbAction`) is one shift away from another key of the same view: a slip never
acts on a run.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Input

from lorad.tui.actions import verbs
from lorad.tui.actions.action import Action
from lorad.tui.actions.verbs import VERBS

_FIELDS = ("filter", "search", "ask", "compare")  # actions that open a field


def _scrolling(view: str) -> list[Action]:
    return [
        Action(f"{view}.down", "j", "Down", "scroll_down"),
        Action(f"{view}.up", "k", "Up", "scroll_up"),
        Action(f"{view}.top", "g", "First", "scroll_home"),
        Action(f"{view}.bottom", "G", "Last", "scroll_end"),
    ]


# By view.
ACTIONS: dict[str, Sequence[Action]] = {
    "app": [
        Action("app.help", "question_mark,f1", "Help", "help", footer="kept"),
        Action("app.command", "colon", "Commands", "command_line", display=":"),
        Action("app.palette", "ctrl+p", "Find an action or a setting", "command_palette"),
        Action("app.freeze", "H", "Pause refreshing", "app.freeze", "Keep what is shown; again to resume"),
        Action("app.theme", "T", "Next theme", "next_theme"),
        Action("app.quit", "q", "Quit", "quit", footer="kept"),
    ],
    "run": verbs.RUNS,
    "typed": verbs.TYPED,
    "version": verbs.VERSIONS,
    "alias": verbs.ALIASES,
    "pool": verbs.POOLS,
    "screen": [
        Action("screen.copy", "y", "Copy the command", "copy", "The shell's way to what was done last"),
        Action("screen.new", "n", "New run", "open('form')", "A form with its YAML beside it", "spare"),
        Action("screen.serving", "M", "Serving", "open('serving')", "Aliases, traffic, a chat", "spare"),
    ],
    "bill": [
        Action("bill.by", "b", "By what", "choose(0, 1)", footer="shown"),
        Action("bill.since", "v", "Since when", "choose(1, 1)", footer="shown"),
        Action("bill.since_before", "V", "Since when, the other way round", "choose(1, -1)"),
    ],
    "nodes": [Action("nodes.pool", "l", "Its pool", "pool", footer="shown")],
    "boxes": [
        Action("boxes.all", "a", "Runs of all", "open('all')", "The runs of all boxes in one table", "shown")
    ],
    "device": [Action("device.pool", "l", "Its pool", "pool", footer="shown")],
    "pool_screen": [Action("pool.next", "tab", "The slots, or the log", "app.focus_next")],
    "table": [
        Action("table.down", "j", "Down", "move(1)"),
        Action("table.up", "k", "Up", "move(-1)"),
        Action("table.top", "g", "First", "move_to(0)"),
        Action("table.bottom", "G", "Last", "move_to(-1)"),
        Action("table.page_down", "pagedown", "A screen down", "move_screens(1)"),
        Action("table.page_up", "pageup", "A screen up", "move_screens(-1)"),
        Action("table.mark", "space", "Mark", "mark"),
        Action("table.order", "o", "Order by the next column", "order"),
        Action("table.reverse", "O", "Order the other way round", "reverse"),
        Action("table.open", "enter", "Open", "select_cursor"),
    ],
    "board": [
        Action("board.filter", "slash", "Filter", "filter", footer="shown", display="/", first=True),
        Action("board.unfilter", "escape", "Show all, mark none", "unfilter"),
        Action("board.all", "a", "Old runs too", "all"),
        Action("board.acknowledge", "z", "Acknowledge alarms of ended runs", "acknowledge"),
        Action("board.columns", "c", "Columns", "columns", footer="shown"),
        Action("board.fold", "f", "Open the sweep, or fold it into one row", "fold"),
        Action("board.fold_all", "F", "Open all sweeps, or fold all", "fold_all"),
        Action("board.bill", "B", "Bill", "open('bill')", "Who used how much, and what it cost"),
        Action("board.boxes", "b", "Boxes", "open('boxes')", "This machine and those of hosts.yaml"),
        Action(
            "board.nodes", "N", "Nodes", "open('nodes')", "Those of a cluster, who has them, and what is free"
        ),
        Action("board.pool", "l", "The pool of the run", "pool"),
        Action("board.alarm", "exclamation_mark", "Next run with an alarm", "next_alarm", display="!"),
        Action("board.next", "tab", "Next pane", "app.focus_next"),
        Action("board.previous", "shift+tab", "Pane before", "app.focus_previous"),
    ],
    "back": [Action("screen.back", "escape", "Back", "back", footer="kept")],
    "tabs": [
        Action("tabs.next", "right_square_bracket", "Next tab", "tab(1)", display="]"),
        Action("tabs.previous", "left_square_bracket", "Previous tab", "tab(-1)", display="["),
        *(Action(f"tabs.{n}", str(n), f"Tab {n}", f"tab_at({n})") for n in range(1, 9)),
    ],
    "log": _scrolling("log"),
    "curves": [
        Action("curves.back", "left", "A step back", "cursor(-1)"),
        Action("curves.on", "right", "A step on", "cursor(1)"),
        Action("curves.back_far", "shift+left", "Ten steps back", "cursor(-10)"),
        Action("curves.on_far", "shift+right", "Ten steps on", "cursor(10)"),
        Action("curves.first", "home", "The first step", "cursor_to(0)"),
        Action("curves.last", "end", "The last step, and follow it", "cursor_to(-1)"),
        Action("curves.next", "j,down", "Next metric", "metric(1)"),
        Action("curves.previous", "k,up", "Metric before", "metric(-1)"),
        Action("curves.alone", "enter", "This chart alone, or all", "alone"),
        Action("curves.metric", "m", "Metric", "choose_metric", footer="shown"),
        Action("curves.compare", "a", "Compare", "compare", footer="shown"),
        Action("curves.uncompare", "A", "No other runs", "uncompare"),
        Action("curves.smooth", "e", "Smooth: EMA 0, 0.6, 0.9, 0.97", "look('smooth')"),
        Action("curves.log", "L", "Logarithmic, or not", "look('log')"),
        Action("curves.spikes", "c", "Spikes within, or cut", "look('spikes')"),
        Action("curves.best", "b", "Mark the best, or not", "look('best')"),
        Action("curves.axis", "u", "X by steps, tokens or time", "look('x')"),
        Action("curves.hide", "D", "No chart of this metric", "hide"),
        Action("curves.export", "E", "Export as PNG, SVG or CSV", "export"),
        Action("curves.in", "plus,equals_sign", "Zoom", "zoom(0.5)", footer="shown", display="+"),
        Action("curves.out", "minus", "Zoom out", "zoom(2)", display="-"),
        Action("curves.whole", "0", "All steps", "zoom(0)"),
        Action("curves.left", "h", "Earlier steps", "move(-0.25)"),
        Action("curves.right", "l", "Later steps", "move(0.25)"),
        Action("curves.tail", "t", "The last 1000, 200, 50 steps, or all", "tail"),
        Action("curves.figures", "f", "The table of figures, or not", "figures"),
    ],
    "over": [Action("over.help", "question_mark,f1", "Help", "app.help")],
    "choose": [
        Action("choose.cancel", "escape", "Cancel", "dismiss", footer="shown"),
        Action("choose.down", "down", "Down", "go(1)"),
        Action("choose.up", "up", "Up", "go(-1)"),
    ],
    "columns": [
        Action("columns.cancel", "escape", "As before", "dismiss", footer="shown"),
        Action("columns.toggle", "space", "Shown, or not", "show_or_not", footer="shown", first=True),
        Action("columns.done", "enter", "Done", "done", footer="shown", first=True),
        Action("columns.left", "shift+up", "Further to the left", "shift(-1)", first=True),
        Action("columns.right", "shift+down", "Further to the right", "shift(1)", first=True),
        Action("columns.usual", "ctrl+r", "The usual ones", "usual", first=True),
        Action("columns.down", "down", "Down", "go(1)"),
        Action("columns.up", "up", "Up", "go(-1)"),
    ],
    "confirm": [
        Action("confirm.no", "n,escape", "No", "dismiss(False)", footer="shown", display="n"),
        Action("confirm.yes", "y", "Yes", "dismiss(True)", footer="shown"),
        Action("confirm.other", "left,right,h,l", "Other button", "app.focus_next"),
        Action("confirm.down", "down,j", "Down", "scroll(1)"),
        Action("confirm.up", "up,k", "Up", "scroll(-1)"),
    ],
    "ask": [
        Action("ask.cancel", "escape", "Cancel", "dismiss", footer="shown"),
        Action("ask.go", "ctrl+s", "Do it", "go", footer="shown"),
        Action("ask.next", "down", "Next field", "app.focus_next", first=True),
        Action("ask.previous", "up", "Previous field", "app.focus_previous", first=True),
    ],
    "close": [
        Action("help.search", "slash", "Search", "search", footer="shown", display="/", first=True),
        Action("help.back", "escape", "No search, or close", "back"),
        Action("help.close", "question_mark,f1,q,enter", "Close", "app.pop_screen", footer="shown"),
        Action("help.down", "j,down", "Down", "scroll(1)"),
        Action("help.up", "k,up", "Up", "scroll(-1)"),
    ],
    "choice": [
        Action("choice.next", "right,space", "Next choice", "turn(1)"),
        Action("choice.previous", "left", "Previous choice", "turn(-1)"),
    ],
    "form": [
        Action("form.start", "ctrl+s", "Start", "start", footer="shown"),
        Action("form.write", "ctrl+o", "Write", "write", footer="shown"),
        Action("form.flip", "ctrl+t", "YAML", "flip", footer="shown"),
        Action("form.copy", "ctrl+y", "Copy the command", "copy"),
        Action("form.next", "enter,down", "Next field", "move(1)", first=True),
        Action("form.previous", "up", "Previous field", "move(-1)", first=True),
        Action("form.tab", "tab", "Next field, or the YAML", "app.focus_next", first=True),
        Action("form.back_tab", "shift+tab", "The one before", "app.focus_previous", first=True),
        Action("form.back", "escape,q", "Back", "back", footer="kept", display="esc"),
    ],
    "line": [
        Action("line.cancel", "escape", "Close", "dismiss", footer="shown"),
        Action("line.next", "tab", "Complete, again: the next", "complete(1)", first=True),
        Action("line.previous", "shift+tab", "The candidate before", "complete(-1)", first=True),
        Action("line.before", "up", "The line before", "recall(-1)", first=True),
        Action("line.after", "down", "The line after", "recall(1)", first=True),
    ],
    "pick": [
        Action("pick.down", "down", "Down", "move(1)"),
        Action("pick.up", "up", "Up", "move(-1)"),
        Action("pick.page_down", "pagedown", "Ten down", "move(10)"),
        Action("pick.page_up", "pageup", "Ten up", "move(-10)"),
        Action("pick.cancel", "escape", "Cancel", "dismiss", footer="shown"),
    ],
    "spec": [
        Action("spec.diff", "d", "Compare", "ask('other')", footer="shown", display="d", first=True),
        Action("spec.all", "a", "Defaults too", "all", footer="shown"),
        Action("spec.search", "slash", "Search", "ask('search')", footer="shown", display="/", first=True),
        Action("spec.copy", "Y", "Copy the YAML", "copy_yaml", footer="shown"),
        Action("spec.like", "L", "New run like it", "like", footer="shown"),
    ],
    "spec_text": _scrolling("spec"),
    "why_text": _scrolling("why"),
    "samples": [
        Action("samples.earlier", "less_than_sign,comma", "Earlier step", "step(-1)", "", "shown", "<"),
        Action("samples.later", "greater_than_sign,full_stop", "Later step", "step(1)", "", "shown", ">"),
        Action("samples.jump", "number_sign", "Step …", "ask('step')", "", "shown", "#", first=True),
        Action("samples.latest", "l", "Latest", "latest"),
        Action("samples.search", "slash", "Search", "ask('search')", footer="shown", display="/", first=True),
        Action("samples.next", "n", "Next match", "find(1)"),
        Action("samples.previous", "N", "Match before", "find(-1)"),
        Action("samples.filter", "f", "Filter", "ask('filter')", footer="shown", display="f", first=True),
        Action("samples.ends", "e", "Histogram of rewards and lengths; which samples", "choose_filter"),
        Action("samples.all", "a", "All samples, or prompts", "flat"),
        Action("samples.source", "t", "Training or eval", "source", footer="shown"),
        Action("samples.history", "h", "A held-out prompt at all steps", "history"),
        Action("samples.order", "v", "Order of the completions", "by"),
        Action("samples.diff", "d", "Compare", "compare", footer="shown"),
        Action("samples.run", "b", "Beside another run", "other_run"),
        Action("samples.other", "equals_sign", "Compare with step …", "ask('other')", display="="),
        Action("samples.words", "w", "Word by word, or side by side", "words"),
        Action("samples.unfold", "z", "Long prompts, answers and calls whole, or folded", "unfold"),
        Action("samples.special", "i", "Special tokens and blanks, or not", "look('special')"),
        Action("samples.chances", "c", "Tokens coloured by their probability", "chances"),
        Action("samples.markdown", "m", "Markdown rendered, or as written", "look('markdown')"),
        Action("samples.undo", "escape", "Leave the text, the comparison, search, filter", "undo"),
    ],
    "versions_tab": [Action("versions.current", "c", "Current one", "current", footer="shown")],
    "checkpoints": [
        replace(VERBS["resume"], id="checkpoints.resume", keys="r", label="Resume from it"),
        replace(VERBS["fork"], id="checkpoints.fork", keys="f", label="Fork its version"),
    ],
    "prompt": [Action("prompt.close", "escape", "Close", "close")],
    "logs": [
        Action("logs.filter", "slash", "Filter", "filter", footer="shown", display="/", first=True),
        Action("logs.unfilter", "escape", "All lines", "unfilter"),
        Action("logs.next", "o", "Next process", "turn(1)", footer="shown"),
        Action("logs.previous", "O", "Process before", "turn(-1)"),
        Action("logs.follow", "f", "Follow", "follow", footer="shown"),
    ],
    "events": [
        Action("events.filter", "slash", "Filter", "filter", footer="shown", display="/", first=True),
        Action("events.unfilter", "escape", "All events", "unfilter"),
        Action("events.kind", "v", "Show other kinds", "kind(1)", footer="shown"),
        Action("events.kind_before", "V", "Show the kind before", "kind(-1)"),
    ],
    "serving": [Action("serving.chat", "c", "Chat", "chat", footer="shown")],
    "chat": [
        Action("chat.leave", "escape", "Cancel the answer, or go back", "leave", footer="shown"),
        Action("chat.before", "up", "The prompt before", "recall(-1)"),
        Action("chat.next", "down", "The next prompt", "recall(1)"),
        Action("chat.page_up", "pageup", "Answers up", "page(-1)"),
        Action("chat.page_down", "pagedown", "Answers down", "page(1)"),
    ],
}

# By heading of the help; an id is under one of them alone, by which the help knows what works where.
HELP: dict[str, list[Action]] = {
    heading: [row for view in views.split() for row in ACTIONS[view]]
    for heading, views in {
        "Everywhere": "app screen back",
        "Runs, those that are marked or the one under the cursor": "run",
        "The dashboard": "board",
        "Its columns": "columns",
        "Pools, the one under the cursor": "pool",
        "The screen of a pool": "pool_screen",
        "The screen of a device": "device",
        "The nodes of a cluster": "nodes",
        "The bill": "bill",
        "All boxes": "boxes",
        "Tables": "table",
        "The run's screen": "tabs",
        "Curves": "curves",
        "Samples": "samples",
        "Versions": "version",
        "The versions of a run": "versions_tab",
        "Checkpoints": "checkpoints",
        "Aliases": "alias serving",
        "The chat": "chat",
        "Texts": "log",
        "Logs": "logs",
        "Events": "events",
        "A new run": "form choice",
        "Specs": "spec spec_text",
        "Why it does not learn": "why_text",
        "What an action asks for": "ask",
        "A question": "confirm",
        "What a new run begins with": "pick",
        "A choice": "choose",
        "The command line": "line",
        "This help": "close",
    }.items()
}
ROWS = [row for rows in ACTIONS.values() for row in rows]
IDS = {row.id: row for row in ROWS if row.id and row.keys}
SCREENS = {row.does.split("'")[1]: row for row in ROWS if row.does.startswith("open(")}


def bindings(*views: str) -> list[BindingType]:
    """Return the keys of some views for a screen or a widget."""
    return [row.binding for view in views for row in ACTIONS[view] if row.keys]


def opens(screen: Screen[Any], action: str) -> bool:
    """Whether an action is possible now: none opens a field while another one is typed in."""
    return not (action in _FIELDS and isinstance(screen.focused, Input))
