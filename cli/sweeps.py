"""Sweeps on a terminal: tables of their runs, and following one until all of its runs are over."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from msgspec import structs

from lorad.cli import output, parallel, table
from lorad.cli.many import OVER
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.words import phase, trained_nothing
from lorad.errors import DaemonUnreachable
from lorad.records.sweeps import LOWER_IS_BETTER, Rung, Sweep, SweepRun

_PERIOD = 0.5  # seconds between looks
_SWEEPS = table.columns("sweep, runs, halving 2, best 1, age 3, grid fold")
_RUNGS = table.columns("rung, best 1, kept fold, stopped fold")


def show(sweeps: Sequence[Sweep], *, in_full: bool, as_json: bool, markdown: bool = False) -> None:
    """Print each sweep in a line, or a single one with its runs, the best first, and its rungs."""
    if as_json:
        output.print_json(structs.replace(sweeps[0], runs=ranked(sweeps[0])) if in_full else sweeps)
    elif markdown:
        for line in table.markdown_lines(_columns(sweeps[0]), _rows(sweeps[0])):
            output.report(line)
    elif not in_full:
        rows = []
        for sweep in sweeps:
            halves = ""
            if halving := sweep.halving:
                halves = f"{'asha, ' * halving.asha}{halving.metric} at {', '.join(map(str, halving.rungs))}"
            best = next((run.name for run in ranked(sweep)[:1] if not trained_nothing(run)), "")
            grid = " ".join(f"{key}={','.join(values)}" for key, values in sweep.grid.items())
            states = _states_in_words(sweep)
            rows.append((sweep.sweep, states, halves, best, output.age(sweep.created_at), grid))
        output.print_table(_SWEEPS, rows, empty="No sweeps.")
    else:
        (sweep,) = sweeps
        output.print_table(_columns(sweep), _rows(sweep), empty="Its runs were removed.")
        if sweep.rungs:
            print()
            rungs = []
            for rung in sweep.rungs:
                score = output.number(_best_of(sweep, rung, rung.scores))
                rungs.append((f"step {rung.step}", score, ", ".join(rung.kept), ", ".join(rung.stopped)))
            output.print_table(_RUNGS, rungs, empty="")
        if (width := table.terminal_width()) is not None:
            picture = parallel.lines(sweep, ranked(sweep), width)
            print(*([""] if picture else []), *picture, sep="\n")


def write_svg(sweep: Sweep, path: Path) -> None:
    """Write the picture of a sweep: a line for each run through its values and its score."""
    path.write_text(parallel.picture(sweep, ranked(sweep)))
    output.note(f"Written to {path}.")


def summary(sweep: Sweep) -> str:
    states = _states_in_words(sweep)
    return f"sweep {sweep.sweep}: {states}. `lorad sweep --list {sweep.sweep}` shows its progress."


def _states_in_words(sweep: Sweep) -> str:
    """Count the runs by state: `3 running, 1 completed`."""
    counts = Counter(run.reason or phase(run) for run in sweep.runs)
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "no runs"


def _columns(sweep: Sweep) -> tuple[str | table.Column, ...]:
    ranks = {"eval": 2, "best": 6, "nll": 2, "loss": 3, "reward": 3, "step": 5, "time": 4, "state": 0}
    keys = (table.Column(key, 1) for key in sweep.grid)
    columns = (table.Column(name, ranks[name]) for name in (*_figures(sweep), "step", "time", "state"))
    return ("run", *keys, *columns, table.Column("why", kind="fold"))


def _figures(sweep: Sweep) -> dict[str, Callable[[SweepRun], float | None]]:
    """Return the figures of the table by name: rewards, or without these what was learnt of completions."""
    figures = {**parallel.SCORES, "best": lambda run: run.eval_best}
    learns = any(run.nll_last is not None or _is_without_reward(run) for run in sweep.runs)
    has_rewards = not learns or any(run.reward_mean is not None for run in sweep.runs)
    has_scores = not learns or any(run.eval_last is not None for run in sweep.runs)
    shown = ("eval", "best") * has_scores + ("nll", "loss") * learns + ("reward",) * has_rewards
    return {name: figures[name] for name in shown}


def _is_without_reward(run: SweepRun) -> bool:
    return run.reward_mean is None and run.loss_mean is not None


def _rows(sweep: Sweep) -> list[tuple[str, ...]]:
    return [
        (
            run.name,
            *(value if isinstance(value, str) else json.dumps(value) for value in run.values.values()),
            *(output.number(figure(run)) for figure in _figures(sweep).values()),
            f"{run.step}/{run.steps}",
            "" if run.started_at is None else output.duration((run.ended_at or time.time()) - run.started_at),
            run.reason or phase(run),
            stopped(sweep, run) or output.why(run),
        )
        for run in ranked(sweep)
    ]


def stopped(sweep: Sweep, run: SweepRun) -> str:
    """Return why a run was stopped early: the rung that did it, or else what its driver said."""
    if run.reason != "stopped":
        return ""
    for rung in sweep.rungs:
        if run.name in rung.stopped:
            own = _score_in_words(rung.scores[run.name])
            best = _score_in_words(_best_of(sweep, rung, rung.kept))
            return f"stopped by halving at step {rung.step}: {own}, the best had {best}"
    return run.detail


def _best_of(sweep: Sweep, rung: Rung, names: Iterable[str]) -> float | None:
    """Return the best score of some runs at a rung; None where none of them has a score."""
    best = min if sweep.halving and sweep.halving.metric in LOWER_IS_BETTER else max
    return best((score for name in names if (score := rung.scores[name]) is not None), default=None)


def _score_in_words(score: float | None) -> str:
    return "no score" if score is None else f"{score:.3g}"


def ranked(sweep: Sweep) -> list[SweepRun]:
    """Return the runs, the best first and what failed last.

    Later in the halving is better, then a higher score.
    """
    metric = sweep.halving.metric if sweep.halving else "eval"

    def rank(run: SweepRun) -> tuple[float, ...]:
        passed = sum(run.name in rung.kept for rung in sweep.rungs)
        loss = run.loss_mean if _is_without_reward(run) else None
        figures = {"eval": run.eval_last, "nll": run.nll_last, "reward": run.reward_mean, "loss": loss}
        signs = {name: 1 if name in LOWER_IS_BETTER else -1 for name in (metric, *figures)}
        scores = ((sign, figures.get(name)) for name, sign in signs.items())
        has_failed = run.reason not in (None, "completed", "stopped") or trained_nothing(run)
        return has_failed, -passed, *(float("inf") if of is None else sign * of for sign, of in scores)

    return sorted(sweep.runs, key=rank)


def follow(client: Client, name: str, *, quiet: bool) -> Sweep | None:
    """Return the sweep when all its runs are over; None when the user detached.

    A daemon that dies is started again.
    """
    view: AbstractContextManager[Callable[[Sweep], None]] = _table() if sys.stderr.isatty() else _lines()
    if quiet:
        view = nullcontext(lambda _: None)
    try:
        with view as update:
            while True:
                try:
                    (sweep,) = client.sweeps(name)
                except DaemonUnreachable:
                    launch.start(client)
                    continue
                update(sweep)
                if all(run.state in OVER for run in sweep.runs):
                    return sweep
                time.sleep(_PERIOD)
    except KeyboardInterrupt:
        output.note(f"Detached; {name} continues. `lorad sweep --list {name}` shows its progress.")
    return None


@contextmanager
def _lines() -> Iterator[Callable[[Sweep], None]]:
    """Print a line when the state of a run changes or a rung is decided: for logs and pipes."""
    printed: dict[str, str] = {}
    decided = 0

    def update(sweep: Sweep) -> None:
        nonlocal decided
        for run in sweep.runs:
            state = phase(run) + (f": {run.reason} at step {run.step}" if run.reason else "")
            text = f"{state} ({run.waiting})" if run.waiting else state
            if printed.get(run.name) != text:
                printed[run.name] = text
                output.note(f"{run.name}: {text}")
        is_open = sweep.halving is not None and sweep.halving.asha  # rungs that still grow
        for rung in [] if is_open else sweep.rungs[decided:]:
            output.note(f"halving at step {rung.step} keeps {', '.join(rung.kept) or 'none'}")
        decided = len(sweep.rungs)

    yield update


@contextmanager
def _table() -> Iterator[Callable[[Sweep], None]]:
    """Draw the table of the runs again and again."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def update(sweep: Sweep) -> None:
            lines = table.table_lines(_columns(sweep), _rows(sweep), live.console.width, single=True)
            live.update(Text("\n".join(lines)), refresh=True)

        yield update
