"""A group of samples as a text to read, alone or beside that of another step."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from lorad.text import number
from lorad.tui import text_diff
from lorad.tui.dashboard.run_rows import bar
from lorad.tui.samples.groups import Group, Sample, ordered
from lorad.tui.widgets.text_view import Block, Section, Span

_PROMPT = -1  # key of the prompt's block; completions have their place in the group
_HALF = 4  # cells of a bar, to each side where there is a 0


class Scale(NamedTuple):
    """The smallest and largest reward of a step, and its largest advantage of either sign."""

    low: float
    high: float
    most: float

    def share(self, reward: float) -> float:
        """0 to 1. Where all are alike: 1 if they are above 0, else 0."""
        share = (reward - self.low) / (self.high - self.low) if self.high > self.low else float(reward > 0)
        return share if math.isfinite(share) else 0.0


def scale(groups: Sequence[Group]) -> Scale:
    rewards = [reward for group in groups for reward in group.rewards]
    advantages = [
        abs(one.advantage) for group in groups for one in group.samples if one.advantage is not None
    ]
    return Scale(min(rewards, default=0.0), max(rewards, default=1.0), max(advantages, default=0.0))


# -- one group -----------------------------------------------------------------------------------------------
def alone(group: Group, of: int, by: str, measure: Scale) -> list[Section]:
    """The prompt, then its completions in order. of: how many prompts the step has."""
    blocks = [
        Block(f"prompt {group.rank + 1} of {of}, {group.id}", "bold"),
        Block(group.prompt, key=_PROMPT, name="prompt"),
    ]
    blocks += [Block(f"answer: {group.answer}", "dim", name="answer")] if group.answer else []
    for place in ordered(group.samples, by):
        sample = group.samples[place]
        blocks += [Block(""), _head(sample, measure), Block(sample.completion, key=place), *_wrong(sample)]
    return [Section(blocks)]


def _head(sample: Sample, measure: Scale, before: str = "") -> Block:
    """Its figures; signs and bars beside colours."""
    parts: list[tuple[str, str]] = [(f"{before}#{sample.index} ", "bold")]
    if sample.reward is None:
        parts.append(("reward: none ", "red"))
    else:
        parts.append((f"reward {sample.reward:.3f} {bar(measure.share(sample.reward), _HALF)} ", "cyan"))
    if sample.advantage is not None:
        style = "green" if sample.advantage > 0 else "red" if sample.advantage < 0 else "dim"
        parts.append((f"advantage {sample.advantage:+.3f} {_signed(sample.advantage, measure.most)} ", style))
    parts.append((" · ".join(_figures(sample)), "dim"))
    spans, at = list[Span](), 0
    for text, style in parts:
        spans.append((at, at + len(text), style))
        at += len(text)
    return Block("".join(text for text, _ in parts), spans=spans)


def _figures(sample: Sample) -> list[str]:
    parts = [f"{sample.tokens} tokens" if sample.tokens else "", sample.finish]
    parts += [f"{name} {number(value)}" for name, value in sample.rewards.items()]
    parts += [f"logprob {number(sample.logprob)}" if sample.logprob is not None else ""]
    return [one for one in (*parts, f"@{sample.version}" if sample.version else "") if one]


def _signed(value: float, most: float) -> str:
    """A bar to the left or right of the middle: 0.5 of 1 -> ····│██··"""
    length = round(abs(value) / most * _HALF) if most else 0
    left, right = ("█" * length if value < 0 else "", "█" * length if value > 0 else "")
    return f"{left.rjust(_HALF, '·')}│{right.ljust(_HALF, '·')}"


def _wrong(sample: Sample) -> list[Block]:
    return [Block(f"✖ {sample.error}", "bold red")] if sample.error else []


# -- two groups ----------------------------------------------------------------------------------------------
class Side(NamedTuple):
    step: int
    group: Group
    scale: Scale


def together(before: Side, after: Side, by: str, here: int, *, word_by_word: bool) -> list[Section]:
    """The completions of two steps in pairs, best with best when they are ordered by reward; the earlier step
    first.
    here: the step whose blocks have keys.

    Word by word: as one text, with [-what is gone-] and {+what is new+}."""
    names = [f"step {side.step} " for side in (before, after)]
    sections = [_prompts(before, after)]
    places = zip_longest(ordered(before.group.samples, by), ordered(after.group.samples, by))
    for one, other in places:
        left = None if one is None else before.group.samples[one]
        right = None if other is None else after.group.samples[other]
        heads = [
            Block(f"{name}has no more", "dim") if sample is None else _head(sample, side.scale, name)
            for name, sample, side in zip(names, (left, right), (before, after), strict=True)
        ]
        sections.append(Section([Block("")]))
        sections.append(Section([heads[0]], [heads[1]]))
        texts = ("" if left is None else left.completion, "" if right is None else right.completion)
        sections.append(_merged(*texts) if word_by_word else _apart(texts, (one, other), here == after.step))
    return sections


def _prompts(before: Side, after: Side) -> Section:
    if before.group.id == after.group.id:
        return Section([Block(f"prompt {after.group.id}", "bold"), Block(after.group.prompt, name="prompt")])
    left, right = (
        [Block(f"step {side.step}, prompt {side.group.id}", "bold"), Block(side.group.prompt, name="prompt")]
        for side in (before, after)
    )
    return Section(left, right)


def _apart(texts: tuple[str, str], places: tuple[int | None, int | None], is_second: bool) -> Section:
    """Return two texts with what only one of them has underlined. is_second: which of them has a key, its
    place.
    """
    pieces, blocks = text_diff.words(*texts), list[Block]()
    for side, (left_out, style) in enumerate(
        ((text_diff.NEW, "underline red"), (text_diff.GONE, "underline green"))
    ):
        spans = _spans([piece for piece in pieces if piece.op != left_out], style)
        blocks.append(Block(texts[side], spans=spans, key=places[side] if is_second == bool(side) else None))
    return Section(blocks[:1], blocks[1:])


def _spans(pieces: Sequence[text_diff.Piece], style: str) -> list[Span]:
    spans, at = list[Span](), 0
    for piece in pieces:
        if piece.op != text_diff.SAME:
            spans.append((at, at + len(piece.text), style))
        at += len(piece.text)
    return spans


def _merged(before: str, after: str) -> Section:
    signs = {
        text_diff.GONE: ("[-", "-]", "red"),
        text_diff.NEW: ("{+", "+}", "green"),
        text_diff.SAME: ("", "", ""),
    }
    text, spans, at = list[str](), list[Span](), 0
    for op, piece in text_diff.words(before, after):
        begin, end, style = signs[op]
        text.append(begin + piece + end)
        spans += [(at, at + len(text[-1]), style)] if style else []
        at += len(text[-1])
    return Section([Block("".join(text), spans=spans)])
