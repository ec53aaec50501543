"""A run for people: a line of text, and for Jupyter a bar and a curve as HTML."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from lorad.client.client import Client
from lorad.client.columns import seconds_left
from lorad.client.shapes import Run, RunDetails, Step
from lorad.client.words import evals_in_words, figure_in_words, share, steps_in_words, why
from lorad.text import duration, number, one_line

_POINTS = 400  # of a curve, about
_METRICS = ("reward", "loss")  # the first that was measured is drawn
_WIDTH, _HEIGHT = 640, 180  # of the picture
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 8, 10, 22  # its margins
_BAR = 24  # characters
_ROUND = "border-radius: 3px; height: 8px"
_BLUE, _ORANGE, _RED, _GREEN = "#4c78a8", "#f58518", "#d62728", "#2ca02c"
_COLOURS = {"failed": _RED, "lost": _RED, "attestation_failed": _RED, "killed": _RED, "completed": _GREEN}

_Points = list[tuple[int, float]]


class Curves(NamedTuple):
    """What is drawn: a metric of steps, and the held-out score."""

    metric: str
    steps: _Points
    evals: _Points


def line(run: Run) -> str:
    """Say in one line how a run stands."""
    bar = int(_BAR * share(run))
    left = seconds_left(run)
    parts = (
        f"{run.name} {run.state}{f' ({run.reason})' if run.reason else ''} {steps_in_words(run)}",
        "━" * bar + "─" * (_BAR - bar) if run.steps else "",
        f"{share(run):.0%}" if run.steps else "",
        figure_in_words(run),
        f"held-out {evals_in_words(run)}" if evals_in_words(run) else "",
        f"ETA {duration(left)}" if left is not None else "",
        why(run),
    )
    return one_line("  ".join(part for part in parts if part))


def curves(client: Client, run: Run) -> Curves:
    """Ask for what is drawn of a run; of a long one every so many steps."""
    steps = client.steps(run.name, every=max(1, run.step // _POINTS))
    metric = next((name for name in _METRICS if any(_value(s, name) is not None for s in steps)), _METRICS[0])
    points = [(s.step, value) for s in steps if (value := _value(s, metric)) is not None]
    evals = [(one.step, one.score) for one in client.evals(run.name) if one.score is not None]
    return Curves(metric, points, evals if metric == "reward" else [])


def _value(step: Step, metric: str) -> float | None:
    return step.metrics.get(metric)


def page(run: RunDetails, drawn: Curves) -> str:
    """Make the HTML of a run: its state, a bar, a line of figures, and a curve."""
    colour = _COLOURS.get(run.reason or "", _BLUE)
    state = run.state + (f": {run.reason}" if run.reason else "")
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
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5

    def place(point: tuple[int, float]) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * point[0] / max(steps, drawn.steps[-1][0])
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - point[1]) / (high - low)
        return x, y

    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_ORANGE}"/>' for x, y in map(place, drawn.evals)
    )
    named = f'{_text(drawn.metric)}<tspan fill="{_ORANGE}"> {"held-out" if drawn.evals else ""}</tspan>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" xmlns="http://www.w3.org/2000/svg" '
        'font-family="sans-serif" font-size="11">'
        f"<title>{_text(drawn.metric)} by step</title>{_axes(low, high, steps)}"
        f"{_path(list(map(place, drawn.steps)), _BLUE, 1.5)}"
        f"{_path(list(map(place, drawn.evals)), _ORANGE, 1.0)}{dots}"
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle" fill="{_BLUE}">{named}</text></svg>'
    )


def _path(places: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    if len(places) < 2:
        return ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _axes(low: float, high: float, steps: int) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    lines = "".join(
        f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="currentColor" stroke-opacity="0.2"/>'
        for y in (_TOP, (_TOP + bottom) / 2, bottom)
    )
    heights = ((_TOP, high), ((_TOP + bottom) / 2, (low + high) / 2), (bottom, low))
    marks = "".join(
        f'<text x="{_LEFT - 4}" y="{y + 4}" text-anchor="end" fill="currentColor">{value:.3g}</text>'
        for y, value in heights
    )
    ends = (
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}" fill="currentColor">0</text>'
        f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end" fill="currentColor">step {steps}</text>'
    )
    return lines + marks + ends


def _text(text: str) -> str:
    return html.escape(one_line(text))
