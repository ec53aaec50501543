"""Writes a line of the samples files as Markdown, without markup by the model."""

from typing import Any

from lorad.text import number

_LONGEST = 4000  # characters of one part


def as_markdown(line: dict[str, Any]) -> str:
    """Return prompt and completion, or the turns of an episode, with the reward."""
    # a short text without line breaks and backticks
    answer = " ".join(str(line.get("answer") or "").replace("`", "'").split())[:200]
    facts = [f"reward {number(line.get('reward')) or '-'}", line.get("end") or line.get("finish")]
    facts += [f"answer `{answer}`" if answer else "", line.get("error")]
    parts = [", ".join(str(fact) for fact in facts if fact), "prompt", _literal(line.get("prompt"))]
    if turns := line.get("turns"):
        for place, turn in enumerate(turns, 1):
            parts += [f"turn {place}, reward {number(turn.get('reward')) or '-'}", _literal(turn.get("text"))]
            parts += ["observation", _literal(turn["observation"])] if turn.get("observation") else []
    else:
        parts += ["completion", _literal(line.get("completion"))]
    return "\n\n".join(parts)


def _literal(text: Any) -> str:
    """Return a block of code: each line behind four spaces."""
    text = str(text or "")
    cut = text[:_LONGEST] + (" …" if len(text) > _LONGEST else "")
    return "\n".join(f"    {line}" for line in cut.split("\n"))
