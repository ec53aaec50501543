"""Follow a run until it is over: a live view on a terminal, a line per step elsewhere. Ctrl-C detaches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lorad.cli.launch import start
from lorad.cli.output import duration, note, number
from lorad.client import Client
from lorad.errors import DaemonUnreachable

Json = dict[str, Any]
PERIOD = 0.25  # seconds between looks
OVER = ("ended", "paused")


def follow(client: Client, name: str, *, quiet: bool = False) -> Json | None:
    """The run when it is over; None when the user detached. A daemon that dies meanwhile is started again."""
    view = Silent() if quiet else (Live() if sys.stderr.isatty() else Lines())
    try:
        with view.shown():
            return _watch(client, name, view)
    except KeyboardInterrupt:
        note(f"Detached; {name} goes on. `lorad show {name}` tells how it does, `lorad logs {name} -f` follows it.")
        return None


def _watch(client: Client, name: str, view: Silent) -> Json:
    step, evaluated, attempt = None, -1, 0
    while True:
        try:
            run = client.show(name)
            if step is None or run["attempt"] != attempt:  # what an earlier attempt did is not told again
                attempt, step = run["attempt"], run["step"]
                evaluated = step or -1
            step = min(step, run["step"])
            steps = client.steps(name, after=step)
            evals = [e for e in client.evals(name) if e["step"] > evaluated]
        except DaemonUnreachable:
            start(client)
            continue
        view.update(run, steps, evals)
        step = steps[-1]["step"] if steps else step
        evaluated = evals[-1]["step"] if evals else evaluated
        if run["state"] in OVER:
            return run
        time.sleep(PERIOD)


class Silent:
    """Says nothing."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        yield

    def update(self, run: Json, steps: list[Json], evals: list[Json]) -> None:
        """Take in the run as it is, its new steps and its new evaluations."""


class Lines(Silent):
    """A line when something changes: for logs and pipes."""

    def __init__(self) -> None:
        self._said = ""

    def update(self, run: Json, steps: list[Json], evals: list[Json]) -> None:
        state = f"{run['name']}: {run['state']}" + (f" ({run['waiting']})" if run.get("waiting") else "")
        if state != self._said and run["state"] not in OVER:  # how it ended is told last, by the verb
            self._said = state
            note(state)
        for step in steps:
            note(f"step {step['step']}/{run['steps']}  {_figures(step['metrics'])}")
        for found in evals:
            note(_evaluation(found))


class Live(Silent):
    """A progress bar with the figures of the last step, and the evaluations as they come."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=None, figures="")
        self._figures = ""

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    def update(self, run: Json, steps: list[Json], evals: list[Json]) -> None:
        for found in evals:
            self._progress.console.print(_evaluation(found), markup=False, highlight=False)
        if steps:
            last = steps[-1]["metrics"]
            left = (run["steps"] - run["step"]) * sum(s["metrics"]["seconds"] for s in steps) / len(steps)
            self._figures = f"{_figures(last)}  ETA {duration(left)}"
        waiting = run.get("waiting") or ""
        self._progress.update(
            self._task,
            description=f"{run['name']} {run['state']} {run['step']}/{run['steps']}",
            total=run["steps"],
            completed=run["step"],
            figures=waiting or self._figures,
        )


def _evaluation(found: Json) -> str:
    failed = f", {found['failed']} rewards failed" if found["failed"] else ""
    scored = found["problems"] - found["failed"]
    return f"held-out eval at step {found['step']}: {number(found['score']) or '-'} on {scored} problems{failed}"


def _figures(m: Json) -> str:
    """What was not measured is a dash."""
    reward, loss, kl = (number(m.get(key), digits) or "-" for key, digits in (("reward", 3), ("loss", 4), ("kl", 4)))
    failed = f"  {m['failed_rewards']:.0f} rewards failed" if m.get("failed_rewards") else ""
    return f"reward {reward}  loss {loss}  kl {kl}  {number(m['tokens_per_second'], 0)} tok/s{failed}"
