"""Lines of a spec as text: a sign before each that is not as in another spec, one for what is wrong, matches
marked.
"""

from collections.abc import Collection, Sequence

from rich.text import Text

from lorad.text import one_line, printable
from lorad.tui.spec_lines import ADDED, GONE, OTHER, SAME, SpecLine

_SIGNS = {SAME: "", ADDED: "green", GONE: "red", OTHER: "yellow"}
WRONG = "✖"


def rendered(lines: Sequence[SpecLine], wrong: Collection[str] = (), found: str = "") -> Text:
    """wrong: keys to mark; found: a word to mark, whatever its case."""
    text = Text("\n", no_wrap=True).join(_line(line, line.key in wrong) for line in lines)
    if found:
        text.highlight_words([found], "reverse", case_sensitive=False)
    return text


def _line(line: SpecLine, is_wrong: bool) -> Text:
    sign, style = (WRONG, "bold red") if is_wrong else (line.sign, _SIGNS[line.sign])
    before = f"   was {one_line(line.before)}" if line.before else ""
    return Text.assemble((f"{sign} {printable(line.text)}", style), (before, "dim"))
