"""A run for people: a line of text, and for Jupyter a bar and a curve as HTML."""

import html
from typing import NamedTuple

from lorad import svg
from lorad.client.client import Client
from lorad.client.columns import seconds_left
from lorad.client.words import evals_in_words, figure_in_words, phase, share, steps_in_words, why
from lorad.records.runs import Run, RunDetails
from lorad.text import duration, number, one_line

_POINTS = 400  # of a curve, about
_METRICS = ("reward", "loss")  # the first that was measured is drawn
# The size of the picture, and its margins.
_WIDTH = 640
_HEIGHT = 180
_LEFT = 48
_RIGHT = 8
_TOP = 10
_BOTTOM = 22
_BAR = 24  # characters
_ROUND = "border-radius: 3px; height: 8px"
_BLUE = "#4c78a8"
_ORANGE = "#f58518"
_RED = "#d62728"
_GREEN = "#2ca02c"
_COLOURS = {"failed": _RED, "lost": _RED, "attestation_failed": _RED, "killed": _RED, "completed": _GREEN}

_Points = list[tuple[int, float]]


class Curves(NamedTuple):
    """The points that are drawn: a metric of steps, and the held-out score."""

    metric: str
    steps: _Points
    evals: _Points


def line(run: Run) -> str:
    """Say in one line how a run stands."""
    bar = int(_BAR * share(run))
    left = seconds_left(run)
    parts = (
        f"{run.name} {phase(run)}{f' ({run.reason})' if run.reason else ''} {steps_in_words(run)}",
        "━" * bar + "─" * (_BAR - bar) if run.steps else "",
        f"{share(run):.0%}" if run.steps else "",
        figure_in_words(run),
        f"held-out {evals_in_words(run)}" if evals_in_words(run) else "",
        f"ETA {duration(left)}" if left is not None else "",
        why(run),
    )
    return one_line("  ".join(part for part in parts if part))


def curves(client: Client, run: Run) -> Curves:
    """Ask for the points that are drawn of a run. Of a long run these are every so many steps."""
    steps = client.steps(run.name, every=max(1, run.step // _POINTS))
    measured = {name for s in steps for name, value in s.metrics.items() if value is not None}
    metric = next((name for name in _METRICS if name in measured), _METRICS[0])
    points = [(s.step, value) for s in steps if (value := s.metrics.get(metric)) is not None]
    evals = [(row.step, row.score) for row in client.evals(run.name) if row.score is not None]
    return Curves(metric, points, evals if metric == "reward" else [])


def page(run: RunDetails, drawn: Curves) -> str:
    """Make the HTML of a run: its state, a bar, a line of figures, and a curve."""
    colour = _COLOURS.get(run.reason or "", _BLUE)
    state = phase(run) + (f": {run.reason}" if run.reason else "")
    left = seconds_left(run)
    figures = (
        f"{steps_in_words(run, ' of ')} steps",
        figure_in_words(run),
        f"held-out {evals_in_words(run, ' → ')}" if evals_in_words(run) else "",
        f"{number(run.rates.tokens_per_second, 0)} tok/s" if run.rates.tokens_per_second else "",
        f"about {duration(left)} left" if left is not None else "",
    )
    trouble = f'<div style="color: {colour}">{_text(why(run))}</div>' if why(run) else ""
    return (
        f'<div style="font-family: sans-serif; max-width: {_WIDTH}px">'
        f"<div><b>{_text(run.name)}</b> <span style='color: {colour}'>{_text(state)}</span> "
        f"{_text(' · '.join(part for part in figures if part))}</div>"
        f'<div role="progressbar" aria-valuenow="{share(run):.0%}" '
        f'style="{_ROUND}; background: #8884; margin: 4px 0">'
        f'<div style="{_ROUND}; background: {colour}; width: {share(run):.1%}"></div></div>'
        f"{trouble}{picture(drawn, max(run.steps, 1))}</div>"
    )


def picture(drawn: Curves, steps: int) -> str:
    """Draw curves over `steps` steps as SVG; "" before there are two points."""
    if len(drawn.steps) < 2:
        return ""
    values = [value for _, value in (*drawn.steps, *drawn.evals)]
    low = min(values)
    high = max(values)
    if high - low < 1e-9:
        low -= 0.5
        high += 0.5

    def place(point: tuple[int, float]) -> svg.Place:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * point[0] / max(steps, drawn.steps[-1][0])
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - point[1]) / (high - low)
        return x, y

    eval_places = [*map(place, drawn.evals)]
    dots = [svg.element("circle", cx=x, cy=y, r=3, fill=_ORANGE) for x, y in eval_places]
    held_out = svg.element("tspan", " held-out", fill=_ORANGE) if drawn.evals else ""
    middle = {"x": _WIDTH / 2, "y": _HEIGHT - 6.0, "text_anchor": "middle", "fill": _BLUE}
    bottom = _HEIGHT - _BOTTOM
    right = _WIDTH - _RIGHT
    heights = ((_TOP, high), ((_TOP + bottom) / 2, (low + high) / 2), (bottom, low))
    parts = [
        svg.title(f"{drawn.metric} by step"),
        *(svg.line((_LEFT, y), (right, y), stroke="currentColor", stroke_opacity=0.2) for y, _ in heights),
        *(
            svg.text((_LEFT - 4, y + 4), f"{value:.3g}", text_anchor="end", fill="currentColor")
            for y, value in heights
        ),
        svg.text((_LEFT, _HEIGHT - 6), "0", fill="currentColor"),
        svg.text((right, _HEIGHT - 6), f"step {steps}", text_anchor="end", fill="currentColor"),
        svg.curve([*map(place, drawn.steps)], stroke=_BLUE, stroke_width=1.5),
        *([svg.curve(eval_places, stroke=_ORANGE, stroke_width=1.0)] if len(eval_places) > 1 else []),
        *dots,
        svg.element("text", _text(drawn.metric) + held_out, **middle),
    ]
    return svg.document(_WIDTH, _HEIGHT, parts, width="100%", role="img", font_size=11)


def _text(text: str) -> str:
    return html.escape(one_line(text))
