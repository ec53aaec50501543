"""Decides what is drawn of the runs' steps, and how: metrics, smoothing, windows, and the notes beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase

from rich.text import Text

from lorad.records.metrics import EVALS, METRICS, metric_of
from lorad.text import one_line
from lorad.tui.curves.axes import bare, short, x_text
from lorad.tui.curves.drawing import BEST, MARKER, Curve, Plot, dashes
from lorad.tui.curves.series import Track, Window, between

SHORT = {  # the short names of what is shown at first, in this order
    "reward": "reward",
    "loss": "loss",
    "kl": "KL",
    "entropy": "entropy",
    "response_length": "length",
    "grad_norm": "grad",
    "eval": "eval",
    "logprob_difference": "mismatch",
    "tokens_per_second": "tok/s",
    "lr": "lr",
    "clip_fraction": "clipped",
}
DARK = ("#5fd7ff", "#ffaf5f", "#87d787", "#ff87af", "#bda5ff", "#ffd75f")
LIGHT = ("#0068a8", "#b84a00", "#1b7a2f", "#b0176a", "#5b35b5", "#7a6a00")
LETTERS = ascii_uppercase
MARKS = 5  # the place of their colour
_GROUNDS = 2  # runs whose raw values fit beneath their smoothed ones
SMOOTH = (0.0, 0.6, 0.9, 0.97)
TAILS = (None, 1000, 200, 50)


@dataclass
class CurveLook:
    """The settings of how curves are shown."""

    smooth: float = 0.6  # as TensorBoard begins
    log: bool = False
    spikes: bool = False  # are all of them within
    x: str = "step"  # one of AXES
    best: bool = True  # is the best point of a curve marked
    window: Window = field(default_factory=Window)


def names(metric: str) -> tuple[str, str]:
    """Return the short and the full name of a metric; names that users gave are in both."""
    plain = one_line(metric).replace("_", " ")
    explained = METRICS.get(metric) or EVALS.get(metric)
    return SHORT.get(metric, plain), plain if explained is None else explained.title


def kind(metric: str) -> str:
    """Say in a word what a metric is about, by which it can be searched for; "" for what is learnt."""
    if metric.startswith("seconds_"):
        return "system · phase of a step"
    explained = METRICS.get(metric)
    return "system" if explained is not None and explained.of_machine else ""


def extent(tracks: Iterable[Track], axis: str = "step") -> tuple[int, int] | None:
    """Return the first and the last x of all tracks; None where none has a step."""
    ends = [(track, xs) for track in tracks for xs in (track.steps, track.evals.xs) if xs]
    firsts = [track.place(axis, xs[0]) for track, xs in ends]
    return (min(firsts), max(track.place(axis, xs[-1]) for track, xs in ends)) if ends else None


def part(track: Track, axis: str, first: int, last: int) -> Track:
    """Return the finest track that covers a window of x."""
    return track.within(track.step_at(axis, first), track.step_at(axis, last))


def smoothing(metric: str, track: Track, look: CurveLook) -> float:
    """Return how much a metric is smoothed: evaluations are few, and not at all."""
    return 0.0 if metric.partition("/")[0] == "eval" or metric in track.sets else look.smooth


def plot(metric: str, tracks: Sequence[Track], look: CurveLook, first: int, last: int) -> tuple[Plot, str]:
    """Return the plot and a note on what was left out or transformed. first, last: the window of x."""
    front = list[Curve]()
    ground = list[Curve]()
    bests = list[tuple[int, float, int]]()
    bad = 0
    left = 0
    for place, whole in reversed(list(enumerate(tracks))):
        track = part(whole, look.x, first, last)
        smooth = smoothing(metric, whole, look)
        series = whole.sets.get(metric) or track.of(metric)
        track = whole if metric in whole.sets else track
        view = series.view(smooth, look.log)
        if smooth and len(tracks) <= _GROUNDS:
            raw = series.view(0.0, look.log)
            ground.append(Curve(track.along(look.x, raw.xs), raw.ys, place, ground=True))
        letter = LETTERS[place % len(LETTERS)] if len(tracks) > 1 else ""
        front.append(Curve(track.along(look.x, view.xs), view.ys, place, letter))
        if look.best and (best := _best(metric, whole, front[-1], first, last)):
            bests.append(best)
        begin, end = between(track.along(look.x, series.bad), first, last)
        bad += end - begin
        begin, end = between(track.along(look.x, view.left), first, last)
        left += end - begin
    track = part(tracks[0], look.x, first, last)
    marks = list[tuple[int, float]]()
    if metric in ("reward", "eval"):  # evals are on their own chart and on that of the reward
        evals = tracks[0].evals.view(0.0, look.log)
        marks = list(zip(tracks[0].along(look.x, evals.xs), evals.ys, strict=True))
    drawn = Plot(
        [*ground, *front],
        first,
        last,
        marks,
        track.along(look.x, (tracks[0].sets.get(metric) or track.of(metric)).bad),
        look.log,
        look.spikes,
        look.x,
        bests,
    )
    parts = [
        f"{bad} NaN" if bad else "",
        f"{left} ≤ 0 left out" if left else "",
        "log" if look.log else "",
    ]
    return drawn, " · ".join(part for part in parts if part)


def _best(metric: str, track: Track, curve: Curve, first: int, last: int) -> tuple[int, float, int] | None:
    """Return the best point of a curve in the window, if one of the metric's values can be called better."""
    begin, end = between(curve.xs, first, last)
    explained = metric_of(metric)
    if explained is None or begin >= end or end - begin < 2:
        return None
    if explained.better == "higher":
        at = max(range(begin, end), key=lambda i: curve.ys[i])
    elif explained.better and not (metric == "loss" and "reward" in track.series):  # of RL it says nothing
        at = min(range(begin, end), key=lambda i: curve.ys[i])
    else:
        return None
    return curve.xs[at], curve.ys[at], curve.place


def title(
    metric: str,
    tracks: Sequence[Track],
    steps: Sequence[int | None],
    colors: Sequence[str],
    drawn: Plot | None,
    *,
    now: bool,
) -> Text:
    """Write the metric's name, its value at a step of each track, and its best one. now: keys act on it."""
    head = Text.assemble((f"{'▶' if now else ' '} {names(metric)[0]}", "bold reverse" if now else "bold"))
    for place, (track, step) in enumerate(zip(tracks, steps, strict=True)):
        value = None if step is None else nearby(metric, track, step)
        letter = f"{LETTERS[place]} " if len(tracks) > 1 else ""
        head.append(f"  {letter}", colors[place]).append(short(value), f"bold {colors[place]}")
    if metric == "reward" and (score := nearby("eval", tracks[0], steps[0])) is not None:
        head.append(f"  {MARKER} ", f"bold {colors[MARKS]}").append(f"eval {short(score)}")
    if drawn is None or len(tracks) > 1:
        return head
    for x, y, place in drawn.best:
        best = f"{bare(10.0**y if drawn.log else y)} at {x_text(drawn.x, x)}"
        head.append(f"  {BEST} ", f"bold {colors[place]}").append(best, "dim")
    return head


def nearby(metric: str, track: Track, step: int | None) -> float | None:
    """Return the value at a step, or at the nearest one that is kept; of evals, the last one until then."""
    if step is None:
        return None
    if metric in track.sets or metric.partition("/")[0] == "eval":
        series = track.of(metric)
        i = between(series.xs, 0, step)[1]
        return series.ys[i - 1] if i else None
    track = track.within(step, step)
    return track.of(metric).at(step, track.every // 2)


def legend(runs: Sequence[str], colors: Sequence[str], has_evals: bool) -> Text:
    """Return the line that says which curve belongs to which run."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for place, run in enumerate(runs):
        line.append(f"{LETTERS[place]} {dashes(place)} ", f"bold {colors[place]}").append(
            f"{one_line(run)}  "
        )
    return line.append(f"{MARKER} ", f"bold {colors[MARKS]}").append("held-out eval") if has_evals else line
