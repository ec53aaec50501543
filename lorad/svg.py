"""Pictures as SVG, for curves in notebooks, sweeps and files. Standard library only."""

from collections.abc import Iterable
from html import escape

from lorad.text import one_line

Place = tuple[float, float]


def document(width: float, height: float, parts: Iterable[str], /, **attributes: object) -> str:
    """Make a picture of so many pixels, which grows with its page."""
    return element(
        "svg",
        "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        font_family="sans-serif",
        **attributes,
    )


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """Write an element; `_` in the names of attributes is `-`. content: elements, or text that is escaped."""
    written = "".join(
        f' {key.replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(place: Place, words: str, /, **attributes: object) -> str:
    """Write words in one line, as they are."""
    return element("text", escape(one_line(words)), x=float(place[0]), y=float(place[1]), **attributes)


def line(start: Place, end: Place, /, **attributes: object) -> str:
    (x1, y1), (x2, y2) = start, end
    return element("line", x1=float(x1), x2=float(x2), y1=float(y1), y2=float(y2), **attributes)


def curve(places: Iterable[Place], content: str = "", /, **attributes: object) -> str:
    """Join places by lines."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return element("polyline", content, points=points, fill="none", **attributes)


def title(words: str) -> str:
    """Say what the element around it is."""
    return element("title", escape(one_line(words)))
