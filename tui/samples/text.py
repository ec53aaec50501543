"""A group of samples as a text to read, alone or beside that of another step."""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from lorad.text import last_turn, number
from lorad.tui import text_diff
from lorad.tui.dashboard.run_rows import bar
from lorad.tui.samples.groups import Group, Sample, ordered
from lorad.tui.samples.look import Look
from lorad.tui.widgets.text_view import Span, TextBlock, TextSection

_PROMPT = -1  # key of the prompt's block; completions have their place in the group
_HALF = 4  # cells of a bar, to each side where there is a 0


class Scale(NamedTuple):
    """The smallest and largest reward of a step, and its largest advantage of either sign."""

    low: float
    high: float
    most: float

    def share(self, reward: float) -> float:
        """Return where a reward lies, from 0 to 1. Where all are alike: 1 if they are above 0, else 0."""
        share = (reward - self.low) / (self.high - self.low) if self.high > self.low else float(reward > 0)
        return share if math.isfinite(share) else 0.0


def scale(groups: Sequence[Group]) -> Scale:
    rewards = [reward for group in groups for reward in group.rewards]
    samples = [sample for group in groups for sample in group.samples]
    advantages = [abs(sample.advantage) for sample in samples if sample.advantage is not None]
    return Scale(min(rewards, default=0.0), max(rewards, default=1.0), max(advantages, default=0.0))


# -- one group -----------------------------------------------------------------------------------------------
def alone(
    group: Group, prompts: int, by: str, measure: Scale, look: Look, only: int | None = None
) -> list[TextSection]:
    """Return the prompt, then its completions in order.

    prompts: how many prompts the step has.
    by: one of ORDERS.
    only: the place of the one sample that is shown; None where all of the group are.
    """
    blocks = _asked(f"prompt {group.rank + 1} of {prompts}, {group.id}", group, look)
    for place in ordered(group.samples, by) if only is None else (only,):
        sample = group.samples[place]
        blocks += [TextBlock(""), _head(sample, measure), *_said(group.id, place, sample, look)]
    return [TextSection(blocks)]


def _prompt(group: Group, key: int | None = None) -> TextBlock:
    return TextBlock(group.prompt, key=key, name="prompt", until=last_turn(group.prompt)[1])


def _asked(head: str, group: Group, look: Look) -> list[TextBlock]:
    """Return the prompt below a head, and its answer where there is one."""
    blocks = [TextBlock(head, "bold"), look.block(_prompt(group, _PROMPT))]
    return blocks + ([TextBlock(f"answer: {group.answer}", "dim", name="answer")] if group.answer else [])


def _said(group: str, place: int, sample: Sample, look: Look) -> Iterator[TextBlock]:
    """Yield the parts of a sample, bright what the model said, dim what it was told; and its error."""
    for part in sample.parts:
        text = sample.completion[part.start : part.end]
        block = TextBlock(text, key=place, at=part.start)
        if part.kind == "said":
            yield look.block(block, (group, sample.index))
        elif part.kind == "call":
            yield look.block(block._replace(short=f"{part.note}  z", style="bold"), (group, sample.index))
        elif part.kind == "observed":
            yield from [TextBlock(part.note, "dim italic")] if part.note else []
            yield block._replace(style="dim", name="observation")
        else:
            yield TextBlock(part.note, "bold yellow" if part.kind == "fork" else "bold dim")
    if sample.error:
        yield TextBlock(f"✖ {sample.error}", "bold red")


def _head(sample: Sample, measure: Scale, before: str = "") -> TextBlock:
    """Write the figures of a sample, with signs and bars beside colours."""
    parts: list[tuple[str, str]] = [(f"{before}#{sample.index} ", "bold")]
    if sample.reward is None:
        parts.append(("reward: none ", "red"))
    else:
        parts.append((f"reward {sample.reward:.3f} {bar(measure.share(sample.reward), _HALF)} ", "cyan"))
    if sample.advantage is not None:
        style = "green" if sample.advantage > 0 else "red" if sample.advantage < 0 else "dim"
        # a bar to the left or right of the middle: 0.5 of 1 is ····│██··
        length = round(abs(sample.advantage) / measure.most * _HALF) if measure.most else 0
        left, right = (length, 0) if sample.advantage < 0 else (0, length)
        signed = f"{'█' * left:·>{_HALF}}│{'█' * right:·<{_HALF}}"
        parts.append((f"advantage {sample.advantage:+.3f} {signed} ", style))
    figures = [f"{sample.turn_count} turns" if sample.turn_count > 1 else ""]
    figures += [f"{sample.size} tokens" if sample.size else "", sample.ending]
    figures += [f"{sample.rows} rows" if sample.rows > 1 else ""]
    figures += [f"{name} {number(value)}" for name, value in sample.rewards.items()]
    figures += [f"logprob {number(sample.logprob)}" if sample.logprob is not None else ""]
    figures += [f"@{sample.version}" if sample.version else ""]
    parts.append((" · ".join(figure for figure in figures if figure), "dim"))
    spans = list[Span]()
    at = 0
    for text, style in parts:
        spans.append((at, at + len(text), style))
        at += len(text)
    return TextBlock("".join(text for text, _ in parts), spans=spans)


# -- two groups ----------------------------------------------------------------------------------------------
class ComparedGroup(NamedTuple):
    """One of the groups that are compared.

    name: what the side is called in front of its samples.
    is_shown: it is the one that the table shows, whose blocks have keys.
    """

    name: str
    group: Group
    scale: Scale
    is_shown: bool = False


def together(
    before: ComparedGroup, after: ComparedGroup, by: str, *, word_by_word: bool
) -> list[TextSection]:
    """Return the completions of two sides in pairs, best with best when they are ordered by reward.

    Word by word, each pair is one text, with [-what is gone-] and {+what is new+}.
    """
    if before.group.prompt == after.group.prompt:
        either = before.group if before.is_shown else after.group
        sections = [TextSection([TextBlock(f"prompt {either.id}", "bold"), _prompt(either)])]
    else:
        prompts = (
            [TextBlock(f"{side.name}, prompt {side.group.id}", "bold"), _prompt(side.group)]
            for side in (before, after)
        )
        sections = [TextSection(*prompts)]
    places = zip_longest(ordered(before.group.samples, by), ordered(after.group.samples, by))
    for left_place, other in places:
        left = None if left_place is None else before.group.samples[left_place]
        right = None if other is None else after.group.samples[other]
        heads = [
            TextBlock(f"{side.name} has no more", "dim")
            if sample is None
            else _head(sample, side.scale, f"{side.name} ")
            for sample, side in zip((left, right), (before, after), strict=True)
        ]
        sections.append(TextSection([TextBlock("")]))
        sections.append(TextSection([heads[0]], [heads[1]]))
        texts = ("" if left is None else left.completion, "" if right is None else right.completion)
        sections.append(
            _merged(*texts) if word_by_word else _apart(texts, (left_place, other), after.is_shown)
        )
    return sections


def one_by_one(sides: Sequence[ComparedGroup], look: Look) -> list[TextSection]:
    """Return one prompt at several steps, in order. Only the side that the table shows has keys."""
    last = sides[-1].group
    blocks = _asked(f"prompt {last.id}", last, look)
    for side in sides:
        for place, sample in enumerate(side.group.samples):
            blocks += [TextBlock(""), _head(sample, side.scale, f"{side.name} ")]
            said = _said(side.group.id, place, sample, look)
            blocks += said if side.is_shown else (block._replace(key=None) for block in said)
    return [TextSection(blocks)]


def _apart(texts: tuple[str, str], places: tuple[int | None, int | None], is_second: bool) -> TextSection:
    """Underline what only one of two texts has. is_second: whose place is its key."""
    pieces = text_diff.words(*texts)
    blocks = list[TextBlock]()
    for side, (left_out, style) in enumerate(
        ((text_diff.NEW, "underline red"), (text_diff.GONE, "underline green"))
    ):
        spans = list[Span]()
        at = 0
        for piece in pieces:
            if piece.op not in (text_diff.SAME, left_out):
                spans.append((at, at + len(piece.text), style))
            at += len(piece.text) if piece.op != left_out else 0
        blocks.append(
            TextBlock(texts[side], spans=spans, key=places[side] if is_second == bool(side) else None)
        )
    return TextSection(blocks[:1], blocks[1:])


def _merged(before: str, after: str) -> TextSection:
    signs = {
        text_diff.GONE: ("[-", "-]", "red"),
        text_diff.NEW: ("{+", "+}", "green"),
        text_diff.SAME: ("", "", ""),
    }
    text = list[str]()
    spans = list[Span]()
    at = 0
    for op, piece in text_diff.words(before, after):
        begin, end, style = signs[op]
        text.append(begin + piece + end)
        spans += [(at, at + len(text[-1]), style)] if style else []
        at += len(text[-1])
    return TextSection([TextBlock("".join(text), spans=spans)])
