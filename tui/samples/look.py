"""How a text of a model is shown: as it is, its special tokens or likely tokens marked, or as Markdown."""

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.text import Text
from rich.theme import Theme

from lorad.records import samples
from lorad.text import SPECIAL
from lorad.tui.samples.groups import Sample
from lorad.tui.samples.parts import inert
from lorad.tui.widgets.text_view import Span, TextBlock

_SPECIAL_STYLE = "magenta reverse"
_LONGEST = 64 * 1024  # characters of Markdown that are rendered: what is longer is shown as it is
_CHANCES = ((0.9, ""), (0.5, "green"), (0.1, "yellow"), (0.0, "bold red underline"))
CHANCES_SAY = "probability: ≥.9 plain, ≥.5 green, ≥.1 yellow, less: red, underlined"
_THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.code_block": "cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
        "markdown.item.bullet": "bold",
        "markdown.item.number": "bold",
        "markdown.block_quote": "italic",
        "markdown.hr": "dim",
        "markdown.link": "underline",
        "markdown.link_url": "underline dim",
    }
)
_SpansOfSamples = Mapping[tuple[str, int], Sequence[Span]]  # spans of samples, by group and index


class Look(NamedTuple):
    """How texts are shown.

    Attributes:
        special: Special tokens are marked, and blanks and line ends shown.
        markdown: Markdown is rendered.
        chances: The styles of tokens, by group and index of their sample; None: tokens are not coloured.
        needle: What a search marks in rendered text, where it has other places.
    """

    special: bool = False
    markdown: bool = False
    chances: _SpansOfSamples | None = None
    needle: str = ""

    def block(self, block: TextBlock, sample: tuple[str, int] | None = None) -> TextBlock:
        """Return a block as it is to be shown. sample: the sample whose tokens it is made of."""
        if self.markdown and len(block.text) <= _LONGEST:
            return block._replace(made=_Rendered(block.text, self.needle))
        spans = list[Span]()
        if self.chances is not None and sample is not None:
            end = block.at + len(block.text)
            for first, last, style in self.chances.get(sample, ()):
                if last > block.at and first < end:
                    spans.append((max(first, block.at) - block.at, min(last, end) - block.at, style))
        if self.special:
            marked = [(*match.span(), _SPECIAL_STYLE) for match in SPECIAL.finditer(block.text)]
            spans = marked if not spans else _over(spans, marked)
        return block._replace(spans=spans) if spans else block


def _over(below: Sequence[Span], above: Sequence[Span]) -> list[Span]:
    """Return the spans of both, without those of `below` that one of `above` touches."""
    clear = [span for span in below if not any(span[0] < other[1] and other[0] < span[1] for other in above)]
    return sorted([*clear, *above])


def chances(row: samples.Sample, sample: Sample) -> list[Span]:
    """Return the styles of a sample's tokens by their probability; none where their places are not known."""
    texts = [turn.text for turn in row.turns] or [row.completion]
    starts = [part.start for part in sample.parts if part.kind == "turn"] or [0]
    sizes = [turn.tokens for turn in row.turns] or [len(row.widths)]
    if not len(row.widths) == len(row.logprobs) == sum(sizes):
        return []
    tokens = iter(zip(row.widths, row.logprobs, strict=True))
    spans = list[Span]()
    for text, start, size in zip(texts, starts, sizes, strict=True):
        at = 0  # in the text as it is
        shown = start  # where its characters are seen
        for width, logprob in itertools.islice(tokens, size):
            seen = len(inert(text[at : at + width]))
            chance = 1.0 if logprob is None else math.exp(min(logprob, 0.0))
            style = next((style for least, style in _CHANCES if chance >= least), "")
            spans += [(shown, shown + seen, style)] if style and seen else []
            at += width
            shown += seen
    return spans


class _Code(CodeBlock):
    """A block of code as it is written: nothing guesses its language."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(str(self.text).rstrip("\n"), style="markdown.code_block")
        yield from (Text("▏ ").append_text(line) for line in text.split("\n"))


class _Markdown(Markdown):
    """Markdown of a model: HTML, as `<think>`, is text like any other, and a line end stays one."""

    elements = Markdown.elements | {"fence": _Code, "code_block": _Code}

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self.markup = text
        self.parsed = parser.parse(text)
        for token in self.parsed:
            for part in token.children or ():
                part.type = "hardbreak" if part.type == "softbreak" else part.type


class _Rendered:
    """Markdown as text and spans for a width; the same for the same text, so that blocks can be compared."""

    def __init__(self, text: str, needle: str) -> None:
        self._text = text
        self._needle = needle

    def __call__(self, width: int) -> tuple[str, list[Span]]:
        console = Console(
            width=max(width, 8),
            theme=_THEME,
            file=io.StringIO(),
            force_terminal=True,
            color_system="standard",
        )
        lines = console.render_lines(_Markdown(self._text), pad=False)
        text = list[str]()
        spans = list[Span]()
        at = 0
        for line in lines:
            for part in line:
                if part.style and (style := str(part.style)) not in ("none", ""):
                    spans.append((at, at + len(part.text), style))
                text.append(part.text)
                at += len(part.text)
            text.append("\n")
            at += 1
        whole = "".join(text).rstrip("\n")
        if not self._needle:
            return whole, spans
        look = re.compile(re.escape(self._needle), re.IGNORECASE)
        return whole, _over(spans, [(*match.span(), "underline yellow") for match in look.finditer(whole)])
