"""Lines of a spec as text, with signs before those that differ from another spec or are wrong."""

from collections.abc import Collection, Sequence

from rich.text import Text

from lorad.text import one_line, printable
from lorad.tui.spec_lines import ADDED, GONE, OTHER, SAME, SpecLine

_SIGNS = {SAME: "", ADDED: "green", GONE: "red", OTHER: "yellow"}
WRONG = "✖"


def rendered(lines: Sequence[SpecLine], wrong: Collection[str] = (), word: str = "") -> Text:
    """Return the lines as text. wrong: keys to mark; word: a word to mark, whatever its case."""
    parts = []
    for line in lines:
        sign, style = (WRONG, "bold red") if line.key in wrong else (line.sign, _SIGNS[line.sign])
        before = f"   was {one_line(line.before)}" if line.before else ""
        parts.append(Text.assemble((f"{sign} {printable(line.text)}", style), (before, "dim")))
    text = Text("\n", no_wrap=True).join(parts)
    if word:
        text.highlight_words([word], "reverse", case_sensitive=False)
    return text
