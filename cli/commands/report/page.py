"""Make the page: one file of HTML and CSS without a script, which browsers let load nothing."""

import hashlib
import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lorad import __version__
from lorad.cli.commands.report import sections
from lorad.cli.commands.report.facts import RunFacts
from lorad.cli.commands.report.parts import PageText, section, table, tag
from lorad.cli.compared import compared, differences
from lorad.client.words import evals_in_words, figure_in_words, phase, steps_in_words
from lorad.tui.curves.drawing import Curve
from lorad.tui.curves.plot import DARK, LETTERS, LIGHT, SHORT, CurveLook, extent, names, plot
from lorad.tui.curves.svg_picture import picture

_TEXTS = 400_000  # characters of what others wrote, of all runs together
_SETS = 6  # charts of further held-out sets
_SMOOTHED = 100  # steps from which curves are smoothed
_ROWS = 80  # that differ between runs
_BANDS = 2  # runs whose intervals can be told apart
_PARTS = (
    sections.findings,
    sections.about,
    sections.evaluations,
    sections.samples,
    sections.versions,
    sections.cost,
    sections.machine,
    sections.spec,
)


def page(facts: Sequence[RunFacts], at: float) -> str:
    """Make the page of runs. at: Unix time at which they were read."""
    room = PageText(_TEXTS)
    title = ", ".join(entry.run.name for entry in facts)
    heads = []  # the name of a run, and in a line how it stands
    for number, entry in enumerate(facts):
        run = entry.run
        held_out = evals_in_words(run, " → ")
        parts = (
            phase(run) + (f": {run.reason}" if run.reason else ""),
            f"{steps_in_words(run, ' of ')} steps",
            figure_in_words(run),
            f"held-out {held_out}" if held_out else "",
            f"{(run.spec.get('algorithm') or {}).get('name', '')} on {run.base}",
        )
        lead = room.text(" · ".join(part for part in parts if part))
        name = tag("h2" if len(facts) > 1 else "h1", room.text(_name(number, facts)))
        heads.append(name + tag("p", lead, class_="lead"))
    body = heads[:1]
    if len(facts) > 1:  # how they stand, and what they have otherwise, as `lorad diff` finds it
        body = [tag("h1", room.text(title))]
        runs = [entry.run for entry in facts]
        rows = differences(compared(runs, []), runs)
        links = [f'<a href="#run-{n}">{room.text(_name(n, facts))}</a>' for n in range(len(facts))]
        cells = [[room.text(cell) for cell in row] for row in rows[:_ROWS]]
        more = tag("p", f"{len(rows) - _ROWS:,} more differ.", class_="note") if len(rows) > _ROWS else ""
        body.append(section("Side by side", table(["", *links], cells), more))
    body.append(section("Curves", *_charts(facts)))
    for number, entry in enumerate(facts):
        share = PageText(_TEXTS // len(facts))
        head = heads[number] if len(facts) > 1 else ""
        body.append(tag("section", head, *(part(entry, share) for part in _PARTS), id=f"run-{number}"))
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    written = f"Written by lorad {__version__} at {when}, of what the runs had left by then."
    body.append(tag("footer", written))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{room.text(title, 200)}: lorad</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _name(number: int, facts: Sequence[RunFacts]) -> str:
    name = facts[number].run.name
    return f"{LETTERS[number]} {name}" if len(facts) > 1 else name


# -- curves --------------------------------------------------------------------------------------------------
def _charts(facts: Sequence[RunFacts]) -> list[str]:
    """Draw each metric that a run has, all runs over the same axes; the first chart says which is whose.

    The ends of the intervals of held-out scores are beneath their curve.
    """
    tracks = [entry.track for entry in facts]
    runs = [entry.run.name for entry in facts]
    first, last = extent(tracks) or (0, 0)
    look = CurveLook(0.6 if max(len(track.steps) for track in tracks) >= _SMOOTHED else 0.0, spikes=True)
    sets = dict.fromkeys(name for track in tracks for name in track.sets if name != "eval")
    shown = list[str]()
    for metric in dict.fromkeys(["reward", "eval", *SHORT, *[*sets][:_SETS]]):
        if any(track.of(metric).xs for track in tracks):
            drawn, _ = plot(metric, tracks, look, first, last)
            bands = []
            if metric.partition("/")[0] == "eval" and len(facts) <= _BANDS:
                for place, entry in enumerate(facts):
                    intervals = ((e.step, sections.bounds(e, metric, entry)) for e in entry.evals)
                    ends = [(step, interval) for step, interval in intervals if interval is not None]
                    for end in (0, 1):
                        steps = array("q", (step for step, _ in ends))
                        limits = array("d", (interval[end] for _, interval in ends))
                        bands.append(Curve(steps, limits, place, ground=True))
            drawn = replace(drawn, curves=[*bands, *drawn.curves])
            drawing = picture({metric: drawn}, runs, legend=not shown)
            shown.append(tag("figure", drawing, **{"aria-label": names(metric)[1]}))
    smooth = "Smoothed by 0.6, with the measured values beneath where there are few runs. "
    smoothed = [smooth] * bool(look.smooth)
    coarse = max(track.every for track in tracks)
    thinned = [f"Of long runs every {coarse}th step is drawn."] * (coarse > 1)
    note = tag("p", *smoothed, *thinned, class_="note")
    large = tag("div", *shown[:2], class_="charts large")
    small = tag("div", *shown[2:], class_="charts")
    return [large, small, note] if shown else []


# -- how it looks --------------------------------------------------------------------------------------------
# the rules by which curves have the colours of the dashboard where the ground is dark
_COLOURS = " ".join(
    f'[stroke="{light}"] {{ stroke: {dark} }} [fill="{light}"] {{ fill: {dark} }}'
    for light, dark in zip(LIGHT, DARK, strict=True)
)
_STYLE = Path(__file__).with_name("page.css").read_text()
_STYLE += f"@media screen and (prefers-color-scheme: dark) {{ {_COLOURS} }}\n"
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'"
)
