"""The figures of a step as a small table, and where its seconds went as bars."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from lorad.text import number
from lorad.tui.curves.axes import short

Values = Mapping[str, float]  # of a step, by metric
Colors = Sequence[str]  # of runs, by place

_FIGURES = (  # name shown, key, digits
    ("reward", "reward", 3),
    ("reward ±", "reward_std", 3),
    ("loss", "loss", 4),
    ("kl", "kl", 4),
    ("entropy", "entropy", 3),
    ("grad norm", "grad_norm", 3),
    ("lr", "lr", None),
    ("mismatch", "logprob_difference", None),
    ("clipped", "clip_fraction", 3),
    ("length", "response_length", 1),
    ("truncated", "truncated", 3),
    ("flat groups", "zero_variance_groups", 0),
    ("prompts", "prompts_sampled", 0),
    ("capped", "importance_capped", 3),
    ("rejected", "rejected", 3),
    ("tok/s", "tokens_per_second", 0),
    ("seconds", "seconds", 2),
    ("staleness", "staleness", 0),
    ("trainer tok/s", "trainer_tokens_per_second", 0),
    ("mfu", "mfu", 3),
    ("ratio", "ratio", 4),
    ("explained", "explained_variance", 3),
    ("value loss", "value_loss", 4),
)
_USUAL = ("reward", "reward_std", "loss", "kl", "entropy", "grad_norm", "logprob_difference", "clip_fraction")
"""What has its place also in a step in which it was not measured."""


@dataclass(frozen=True)
class _Verb:
    """A part of a step: a pattern, and the place of its colour among those of runs."""

    name: str
    fill: str
    place: int


_VERBS = (
    _Verb("sample", "█", 2),
    _Verb("score", "▚", 5),
    _Verb("weigh", "▞", 1),
    _Verb("train", "▓", 0),
    _Verb("publish", "▒", 3),
    _Verb("attest", "░", 4),
    _Verb("other", "·", 1),
)


def figures(step: int | None, values: Values, width: int, height: int) -> Text:
    """Return the figures of a step, in one column or, where that does not fit, in two."""
    if step is None:
        return Text("no step yet", style="dim")
    pairs = []
    for name, key, digits in _FIGURES:
        value = values.get(key)
        if value is not None:
            text = short(value) if digits is None or value != value else number(value, digits)
            pairs.append((name, text if len(text) <= 8 else short(value)))
        elif key in _USUAL:
            pairs.append((name, "-"))
    version = f"  @{values['version']:.0f}" if "version" in values else ""
    head = Text.assemble((f"step {step:,}", "bold"), version)
    columns = 2 if width >= 40 else 1
    rows = pairs[: (height - 1) * columns]
    each = width // columns - 1
    cells = [Text.assemble((name, "dim"), f"{shown:>{each - len(name)}}") for name, shown in rows]
    lines = [Text("  ").join(cells[i : i + columns]) for i in range(0, len(cells), columns)]
    return Text("\n", no_wrap=True).join([head, *lines])


def spent(values: Values) -> dict[str, float]:
    """Return the seconds of a step by verb, in order: publishing without attesting, the rest as `other`."""
    took = {verb.name: values[key] for verb in _VERBS if (key := f"seconds_{verb.name}") in values}
    if "attest" in took and "publish" in took:
        took["publish"] = max(took["publish"] - took["attest"], 0.0)
    rest = values.get("seconds", 0.0) - sum(took.values())
    if took and rest > 0.005 * values.get("seconds", 0.0):
        took["other"] = rest
    return {verb.name: took[verb.name] for verb in _VERBS if took.get(verb.name, -1.0) >= 0.0}


def bar(seconds: Mapping[str, float], width: int, colors: Colors, most: float | None = None) -> Text:
    """Draw a stacked bar; `most` seconds fill the width, without it as many as there are."""
    total = sum(seconds.values())
    stacked = Text(no_wrap=True)
    done = 0.0
    if not total > 0.0:
        return stacked
    scale = width / max(most or total, total)
    for verb in _VERBS:
        part = seconds.get(verb.name, 0.0)
        cells = round((done + part) * scale) - round(done * scale)
        stacked.append(verb.fill * cells, colors[verb.place])
        done += part
    return stacked


def where(values: Values, width: int, colors: Colors) -> list[Text]:
    """Return two lines: the bar of a step, and its parts, without the smallest where it is narrow."""
    seconds = spent(values)
    if not seconds:
        return []
    total = sum(seconds.values()) or 1.0
    shown = []
    for verb in _VERBS:
        if (part := seconds.get(verb.name)) is not None:
            amount = (f"{part:.2f}", "bold"), f" {part / total:.0%}"
            shown.append((part, Text.assemble((verb.fill, colors[verb.place]), f" {verb.name} ", *amount)))
    while len(shown) > 1 and sum(text.cell_len + 2 for _, text in shown) - 2 > width:
        shown.remove(min(shown, key=lambda pair: pair[0]))
    return [bar(seconds, width, colors), Text("  ", no_wrap=True).join(text for _, text in shown)]


def column(
    values: Values, before: Iterable[tuple[int, Values]], width: int, height: int, colors: Colors
) -> list[Text]:
    """Return the parts of a step, and below them a bar for each step before, newest first, on one scale."""
    seconds = spent(values)
    if not seconds:
        return []
    total = sum(seconds.values())
    lines = [
        Text.assemble(("where the time goes", "bold"), f"{total:>{max(width - 21, 0)}.2f} s"),
        bar(seconds, width, colors),
    ]
    for verb in _VERBS:
        if (part := seconds.get(verb.name)) is not None:
            amount = f" {verb.name:<8}{part:>9.2f} s{part / total if total else 0.0:>6.0%}"
            lines.append(Text.assemble((verb.fill * 2, colors[verb.place]), amount))
    room = height - len(lines) - 2
    past = [(step, took) for step, of in before if (took := spent(of))][: max(room, 0)]
    if not past:
        return lines[:height]
    most = max(sum(took.values()) for _, took in past)
    digits = max(len(f"{step:,}") for step, _ in past)
    cells = max(width - digits - 9, 0)
    lines += [Text(), Text("the steps before", style="bold")]
    for step, took in past:
        stacked = bar(took, cells, colors, most)
        end = " " * (cells - stacked.cell_len) + f"{f'{sum(took.values()):.2f} s':>8}"
        lines.append(Text.assemble((f"{step:>{digits},} ", "dim"), stacked, end))
    return lines
