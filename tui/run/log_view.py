"""A log that is followed: it stays at its end until somebody scrolls up, and from then on where it is."""

from rich.style import Style
from rich.text import Text
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from lorad.tui import keys
from lorad.tui.run.log_lines import LEVELS, LogLines, level


class LogView(ScrollView, can_focus=True):
    """Draws `lines` as far as they are on the screen; `grown` when there are more, `changed` when there are
    others."""

    BINDINGS = keys.LOG
    DEFAULT_CSS = """
    LogView { height: 1fr; background: $background;
    scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; }
    """

    class Followed(Message):
        """The view now follows the end of the log, or no longer does."""

    def __init__(self, lines: LogLines, *, id: str) -> None:
        super().__init__(id=id)
        self.lines = lines
        self.follows = True

    def grown(self, gone: int) -> None:
        """There are lines more at the end; gone: lines fewer at the beginning."""
        before = self.scroll_offset.y
        self._measure()
        if self.follows:
            self._to_end()
            self.call_after_refresh(self._to_end)  # a scrollbar below may have come
        elif gone:
            self.scroll_to(y=max(before - gone, 0), animate=False, immediate=True)
        self.refresh()

    def changed(self) -> None:
        """Show the log again, from its end."""
        self._measure()
        self._follow(True)
        self._to_end()
        self.call_after_refresh(self._to_end)
        self.refresh()

    def _measure(self) -> None:
        self.virtual_size = Size(self.lines.width + 2, len(self.lines.shown))

    def _to_end(self) -> None:
        self.scroll_to(y=self.max_scroll_y, animate=False, immediate=True, force=True)

    def _follow(self, follows: bool) -> None:
        if follows is not self.follows:
            self.follows = follows
            self.post_message(self.Followed())

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._follow(round(new_value) >= self.max_scroll_y)

    def on_resize(self) -> None:
        if self.follows:
            self.call_after_refresh(self._to_end)  # it is not known yet how far that is

    def action_scroll_end(self) -> None:
        self._to_end()
        self._follow(True)

    def action_scroll_home(self) -> None:
        self.scroll_to(y=0, animate=False, immediate=True)

    def render_line(self, y: int) -> Strip:
        left, top = self.scroll_offset
        style, width = self.rich_style, self.size.width
        if top + y >= len(self.lines.shown):
            return Strip.blank(width, style)
        line = Strip(self._text(self.lines.shown[top + y]).render(self.app.console, end=""))
        return line.crop_extend(left, left + width, None).apply_style(style)

    def _text(self, line: str) -> Text:
        sign, style = LEVELS[level(line)]
        text = Text.assemble((f"{sign} ", style), (line, style), end="")
        for is_not, word in self.lines.words:
            if not is_not:
                text.highlight_words([word], Style(reverse=True), case_sensitive=False)
        return text
