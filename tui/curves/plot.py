"""Decides what is drawn of the runs' steps, and how: metrics, smoothing, windows, and the notes beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from lorad.text import one_line
from lorad.tui.curves.axes import short
from lorad.tui.curves.drawing import MARKER, Curve, Plot, dashes
from lorad.tui.curves.series import Track, Window, between

METRICS = {  # what is shown at first, in this order: a short and a full name
    "reward": ("reward", "reward"),
    "loss": ("loss", "loss"),
    "kl": ("KL", "KL to the reference, nats per token"),
    "entropy": ("entropy", "entropy, nats per token"),
    "response_length": ("length", "response length, tokens"),
    "grad_norm": ("grad", "gradient norm"),
    "eval": ("eval", "held-out eval"),
    "logprob_difference": ("mismatch", "logprob mismatch, engine to trainer"),
    "tokens_per_second": ("tok/s", "tokens per second, engine"),
    "lr": ("lr", "learning rate"),
    "clip_fraction": ("clipped", "share of ratios that were clipped"),
}
LETTERS = "ABCDEF"
MARKS = 5  # the place of their colour
_GROUNDS = 2  # runs whose raw values fit beneath their smoothed ones
SMOOTH = (0.0, 0.6, 0.9, 0.97)
TAILS = (None, 1000, 200, 50)


@dataclass
class Look:
    """The settings of how curves are shown."""

    smooth: float = 0.6  # as TensorBoard begins
    log: bool = False
    spikes: bool = False  # are all of them within
    window: Window = field(default_factory=Window)


def names(metric: str) -> tuple[str, str]:
    plain = one_line(metric).replace("_", " ")
    return METRICS.get(metric, (plain, plain))


def extent(tracks: Iterable[Track]) -> tuple[int, int] | None:
    """First and last step of all."""
    ends = [xs for track in tracks for xs in (track.steps, track.evals.xs) if xs]
    return (min(xs[0] for xs in ends), max(xs[-1] for xs in ends)) if ends else None


def plot(metric: str, tracks: Sequence[Track], look: Look, first: int, last: int) -> tuple[Plot, str]:
    """Return the plot and a note on what was left out or transformed."""
    smooth = 0.0 if metric.partition("/")[0] == "eval" else look.smooth
    front, ground, bad, left = list[Curve](), list[Curve](), 0, 0
    for place, track in reversed(list(enumerate(tracks))):
        series = track.within(first, last).of(metric)
        view = series.view(smooth, look.log)
        if smooth and len(tracks) <= _GROUNDS:
            raw = series.view(0.0, look.log)
            ground.append(Curve(raw.xs, raw.ys, place, ground=True))
        front.append(Curve(view.xs, view.ys, place, LETTERS[place] if len(tracks) > 1 else ""))
        bad += _count(between(series.bad, first, last))
        left += _count(between(view.left, first, last))
    series = tracks[0].within(first, last).of(metric)
    drawn = Plot(
        [*ground, *front], first, last, _marks(metric, tracks[0], look.log), series.bad, look.log, look.spikes
    )
    parts = [
        f"{bad} NaN" if bad else "",
        f"{left} ≤ 0 left out" if left else "",
        "log" if look.log else "",
    ]
    return drawn, " · ".join(part for part in parts if part)


def _count(part: tuple[int, int]) -> int:
    return part[1] - part[0]


def _marks(metric: str, track: Track, log: bool) -> list[tuple[int, float]]:
    """Return the markers of evals, which are on their own chart and on that of the reward."""
    if metric not in ("reward", "eval"):
        return []
    view = track.evals.view(0.0, log)
    return list(zip(view.xs, view.ys, strict=True))


def title(
    metric: str, tracks: Sequence[Track], step: int | None, colors: Sequence[str], *, now: bool
) -> Text:
    """The metric's name and its values at a step; `now`: keys act on this chart."""
    head = Text.assemble((f"{'▶' if now else ' '} {names(metric)[0]}", "bold reverse" if now else "bold"))
    for place, track in enumerate(tracks):
        value = None if step is None else nearby(metric, track, step)
        letter = f"{LETTERS[place]} " if len(tracks) > 1 else ""
        head.append(f"  {letter}", colors[place]).append(short(value), f"bold {colors[place]}")
    if metric == "reward" and (score := nearby("eval", tracks[0], step)) is not None:
        head.append(f"  {MARKER} ", f"bold {colors[MARKS]}").append(f"eval {short(score)}")
    return head


def nearby(metric: str, track: Track, step: int | None) -> float | None:
    """The value at a step, or at the nearest one that is kept; of evals, the last one until then."""
    if step is None:
        return None
    if metric.partition("/")[0] == "eval":
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
