"""A sample as one text, and its parts: what the model said, its calls, and what the environment said."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from lorad.records.episodes import ToolCall
from lorad.records.samples import Sample
from lorad.text import number, one_line, printable
from lorad.tui.widgets.text_view import TAB

_PIECE = 4096  # characters that are looked at together
_ARGUMENTS = 200  # characters of a call's arguments in one line


class Part(NamedTuple):
    """A part of a sample.

    kind: `turn` and `fork` are lines between parts, without a text; the others have the text from `start` to
        `end`.
    note: the line itself; for a call its one line, for what the environment said its figures.
    """

    kind: Literal["turn", "said", "call", "observed", "fork"]
    start: int
    end: int
    note: str = ""


def inert(text: object) -> str:
    """Return what `printable` does, but quickly where nothing is to be done, and with TAB for a tab."""
    whole = "" if text is None else str(text)
    parts = (whole[i : i + _PIECE] for i in range(0, len(whole), _PIECE))
    return "".join(
        part if part.isprintable() else TAB.join(map(printable, part.split("\t"))) for part in parts
    )


def text_and_parts(row: Sample) -> tuple[str, tuple[Part, ...]]:
    """Return the text of a sample, and its parts in order."""
    if not row.turns:
        text = inert(row.completion)
        return text, (Part("said", 0, len(text)),)
    text = ""
    parts = list[Part]()
    for place, turn in enumerate(row.turns):
        follows = row.turns[place + 1] if place + 1 < len(row.turns) else None
        reward = f"reward {turn.reward:+.3f}" if turn.reward else ""
        wrong = f"✖ {turn.tool_errors} of {len(turn.calls)} calls went wrong" if turn.tool_errors else ""
        about = [f"{turn.tokens} tokens", one_line(turn.finish), reward, wrong]
        line = f"── turn {place + 1} ── " + " · ".join(part for part in about if part)
        parts.append(Part("turn", len(text), len(text), line))
        said = inert(turn.text)
        parts += _spoken(said, turn.calls, len(text))
        text += said if said.endswith("\n") else said + "\n"
        if observation := inert(turn.observation).strip("\n"):
            at = len(text)
            figures = f"{turn.observed} tokens · " if turn.observed else ""
            note = f"◂ environment · {figures}{number(turn.seconds, 2)} s"
            if follows is not None and follows.row > turn.row:
                line = f"⑂ row {follows.row + 1} begins: the history was replaced by"
                parts.append(Part("fork", at, at, line))
                note = ""
            parts.append(Part("observed", at, at + len(observation), note))
            text += f"{observation}\n"
    return text, tuple(parts)


def _spoken(text: str, calls: Sequence[ToolCall], at: int) -> Iterator[Part]:
    """Yield the parts of a turn of the model: texts, and a line for each call, with what went wrong."""
    done = 0
    for call in calls:
        written = inert(call.written)
        place = text.find(written, done) if written else -1
        begin, end = (place, place + len(written)) if place >= 0 else (done, done)
        yield from _without_ends(text, done, begin, at)
        arguments = "?"
        if call.arguments is not None:
            texts = {name: msgspec.json.encode(value).decode() for name, value in call.arguments.items()}
            arguments = ", ".join(f"{one_line(name)}={one_line(value)}" for name, value in texts.items())
        if len(arguments) > _ARGUMENTS:
            arguments = arguments[:_ARGUMENTS] + "…"
        line = f"▸ calls {one_line(call.name) or '?'}({arguments})"
        if call.outcome != "ok" or call.error:
            line += f" ✖ {one_line(call.error or call.outcome)}"
        yield Part("call", at + begin, at + end, line)
        done = end
    if done < len(text) or not calls:
        yield from _without_ends(text, done, len(text), at)


def _without_ends(text: str, start: int, end: int, at: int) -> Iterator[Part]:
    """Yield a part without the line breaks around it, if there is more than these."""
    thought = text[start:end].lstrip("\n")
    start = end - len(thought)
    if thought:
        yield Part("said", at + start, at + start + len(thought.rstrip("\n")))
