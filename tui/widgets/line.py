"""A line or a few of text."""

from rich.text import Text
from textual.widgets import Static


class Line(Static):
    """Text that is drawn again only when it changed."""

    said = Text()

    def say(self, text: Text | str) -> None:
        text = Text(text) if isinstance(text, str) else text
        if text != self.said:
            self.said = text
            self.update(text, layout=self._grows)

    @property
    def _grows(self) -> bool:
        """Whether its size depends on the text; if it is fixed,
        the rest of the screen is not laid out again.
        """
        width, height = self.styles.width, self.styles.height
        return width is None or width.is_auto or height is None or height.is_auto
