"""A line or a few of text."""

from rich.text import Text
from textual.widgets import Static


class Line(Static):
    """Text that is drawn again only when it changed."""

    said = Text()

    def say(self, text: Text | str) -> None:
        """Show a text; where the size is fixed, the rest of the screen is not laid out again."""
        text = Text(text) if isinstance(text, str) else text
        if text != self.said:
            self.said = text
            sizes = (self.styles.width, self.styles.height)
            self.update(text, layout=any(size is None or size.is_auto for size in sizes))
