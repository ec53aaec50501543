"""A line of names, some of which are shown: a click chooses one."""

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.message import Message

from lorad.tui.widgets.line import Line


class Names(Line):
    class Picked(Message):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    _ends: tuple[int, ...] = ()

    def offer(self, names: Sequence[str], shown: range, current: int) -> None:
        """shown: those whose charts are on the screen; from as far left as lets the current one be seen."""
        text, ends = Text(no_wrap=True, overflow="ellipsis"), list[int]()
        skipped = self._skipped(names, current)
        for index, name in enumerate(names):
            if index >= skipped:
                look = "bold reverse" if index == current else "bold" if index in shown else "dim"
                text.append(f" {name} ", look)
            ends.append(text.cell_len)
        self._ends = tuple(ends)
        self.say(text)

    def _skipped(self, names: Sequence[str], current: int) -> int:
        widths = [Text(name).cell_len + 2 for name in names]
        return next(
            (i for i in range(current + 1) if sum(widths[i : current + 1]) <= max(self.size.width, 20)),
            current,
        )

    def on_click(self, event: events.Click) -> None:
        index = next((i for i, end in enumerate(self._ends) if event.x < end), None)
        if index is not None:
            self.post_message(self.Picked(index))
