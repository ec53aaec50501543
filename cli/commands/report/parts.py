"""Write pieces of HTML in which what a model, a user or a file wrote is text and never becomes markup."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lorad.text import printable

LINE = 400  # characters of one value


@dataclass
class PageText:
    """Makes text of values, cut in their middle, as long as there is room on the page."""

    _left: int  # characters of all texts together

    def text(self, value: object, most: int = LINE) -> str:
        """Return a value as text of HTML, of at most `most` characters and a note of what is left out.

        Control characters and marks of direction are written out.
        """
        text = str(value)
        most = min(most, self._left)
        if len(text) > most:
            end = most // 3
            dots = f"… {len(text) - most:,} characters left out …"
            text = text[: most - end] + dots + text[len(text) - end :]
        self._left -= min(len(text), most)
        return escape(printable(text))


def tag(name: str, *content: str, **attributes: str) -> str:
    """Write an element around content that is HTML already. attributes: `class_` is class."""
    written = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    return f"<{name}{written}>{''.join(content)}</{name}>"


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """List names and values, both HTML already; "" without any."""
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs if value)
    return rows and tag("dl", rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table of cells that are HTML already, which is scrolled where it is too wide."""
    cells = "".join(tag("tr", *(f"<td>{cell}</td>" for cell in row)) for row in rows)
    top = tag("tr", *(f'<th scope="col">{cell}</th>' for cell in head))
    return tag("div", f"<table><thead>{top}</thead><tbody>{cells}</tbody></table>", class_="wide")


def section(name: str, *content: str) -> str:
    """Put content below a heading; "" without any."""
    return tag("section", f"<h3>{escape(name)}</h3>", *content) if any(content) else ""
