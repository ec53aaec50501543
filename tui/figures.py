"""The figures of a step as a small table, and where its seconds went as a bar."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from lorad.text import number

Json = dict[str, Any]

FIGURES = (  # name shown, key, digits; two to a line
    ("reward", "reward", 3),
    ("loss", "loss", 4),
    ("kl", "kl", 4),
    ("entropy", "entropy", 3),
    ("grad_norm", "grad_norm", 3),
    ("lr", "lr", None),
    ("logprob_diff", "logprob_difference", None),
    ("clipped", "clip_fraction", 3),
    ("length", "response_length", 1),
    ("truncated", "truncated", 3),
    ("tok/s", "tokens_per_second", 0),
    ("seconds", "seconds", 2),
)
VERBS = {"sample": "█", "score": "▚", "weigh": "▞", "train": "▒", "publish": "░"}
COLORS = {"sample": "green", "score": "yellow", "weigh": "yellow", "train": "blue", "publish": "magenta"}
WIDTH = 42


def figures(step: Json | None) -> Text:
    """Of a step as the client gives it."""
    if step is None:
        return Text("no step yet", style="dim")
    m = step["metrics"]
    pairs = [(name, value(m.get(key), digits)) for name, key, digits in FIGURES]
    lines = [
        Text.assemble(*(part for name, v in pairs[i : i + 2] for part in ((f"{name:<13}", "dim"), f"{v:<8}")))
        for i in range(0, len(pairs), 2)
    ]
    return Text("\n", no_wrap=True).join([*lines, *seconds(m)])


def value(number_: Any, digits: int | None) -> str:
    """At most 8 characters; without `digits` as many as matter."""
    if number_ is None:
        return "-"
    return f"{number_:.2g}" if digits is None else number(number_, digits)


def seconds(m: Json) -> list[Text]:
    """A stacked bar of the step's seconds by verb, and its legend. Each verb has a pattern besides its colour."""
    spent = {verb: float(m.get(f"seconds_{verb}") or 0.0) for verb in VERBS if m.get(f"seconds_{verb}") is not None}
    total = sum(spent.values())
    if not total > 0:
        return []
    stacked, legend, done = Text(), Text(), 0.0
    for verb, part in spent.items():
        cells = round((done + part) / total * WIDTH) - round(done / total * WIDTH)
        stacked.append(VERBS[verb] * cells, COLORS[verb])
        legend.append(f"{VERBS[verb]} ", COLORS[verb])
        legend.append(f"{verb} {part:.2f}  ")
        done += part
    return [stacked, *legend_lines(legend)]


def legend_lines(legend: Text) -> list[Text]:
    """In two halves, for a narrow box."""
    middle = [i for i, c in enumerate(legend.plain) if c in VERBS.values()]
    cut = middle[(len(middle) + 1) // 2] if len(middle) > 2 else len(legend)
    return [legend[:cut], legend[cut:]]
