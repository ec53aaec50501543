"""The command `lorad list`: runs, and why they wait. It imports little, so that it starts at once."""

import os
import time
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import typer
from msgspec.structs import replace

from lorad.cli import candidates, output
from lorad.cli.listing import OF_QUEUE, USUAL, show
from lorad.cli.options import AsJson, Watch
from lorad.cli.selecting import chooses_runs
from lorad.client.boxes.hosts import ALL, HOST
from lorad.client.client import Client
from lorad.client.columns import COLUMNS, FILLED, devices_of, filled, groups_of
from lorad.errors import LoradError
from lorad.records.runs import Run
from lorad.selection import Selection, in_commas

_SHOWN = 50  # runs that ended; whatever works or waits is shown in any case


class _Listing(NamedTuple):
    """What to list.

    limit: how many runs were asked for; None leaves the choice to lorad.
    queue: whether only runs that wait for their start are listed.
    """

    selection: Selection
    everything: bool
    columns: list[str]
    sort: list[str]
    limit: int | None
    fold: bool
    queue: bool


@chooses_runs
def list_(
    meant: Selection,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show old ones too.")] = False,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns",
            "-c",
            help="With commas: name,reward, keys of the spec (trainer.lr), metrics of the last step (kl).",
            autocompletion=candidates.columns,
        ),
    ] = None,
    sort: Annotated[
        list[str] | None,
        typer.Option(
            help="By these columns, with commas; -reward: the largest first.",
            autocompletion=candidates.columns,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="At most so many runs.", min=1)] = None,
    group: Annotated[Literal["sweep"] | None, typer.Option(help="One row for the runs of a sweep.")] = None,
    tags: Annotated[
        bool, typer.Option("--tags", help="Show tags and notes in place of why runs wait.")
    ] = False,
    queue: Annotated[
        bool, typer.Option("--queue", "-q", help="Runs that wait for their start, in the order of the queue.")
    ] = False,
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first, and why they wait: the last day's, or with names, globs and filters among
    all.
    """
    shown = in_commas(columns) or ([*USUAL[:-1], "tags", "note"] if tags else [])
    listing = _Listing(meant, everything, shown, in_commas(sort), limit, group is not None, queue)
    clear = "\x1b[H\x1b[2J" if watch and not as_json else ""
    list_once = _list_all_boxes if os.environ.get(HOST) == ALL else _list_home
    while True:
        list_once(listing, clear, as_json=as_json)
        if not watch:
            return
        time.sleep(2)


def _list_home(listing: _Listing, clear: str, *, as_json: bool) -> None:
    """List the runs of one home, and its troubles.

    clear: the escape sequence that empties the screen.
    """
    client = Client()
    runs, more = _read(client, listing, whole=as_json)
    print(clear, end="")
    if as_json:
        groups = [{"sweep": group[0].sweep, "runs": group} for group in groups_of(runs)]
        output.print_json(groups if listing.fold else runs)
    else:
        _show(runs, listing, more)
    if troubles := client.status().troubles:  # on stderr, where programs are not disturbed
        others = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
        output.note(f"trouble: {troubles[0]}{others} `lorad doctor` lists all of it.")


def _list_all_boxes(listing: _Listing, clear: str, *, as_json: bool) -> None:
    """List the runs of all boxes, each as BOX/RUN, and say why a box does not answer.

    Raises the error of the first box where none answers.
    """
    from lorad.cli.commands.machine.boxes import of_all_boxes

    answers = of_all_boxes(lambda client: _read(client, listing, whole=as_json)[0])
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, LoradError)}
    if answers and len(errors) == len(answers):
        raise next(iter(errors.values()))
    runs = {name: answer for name, answer in answers.items() if not isinstance(answer, LoradError)}
    print(clear, end="")
    if as_json:
        output.print_json({"boxes": runs, "errors": {name: error.message for name, error in errors.items()}})
    else:
        named = [replace(run, name=f"{name}/{run.name}") for name, of in runs.items() for run in of]
        _show(named, listing, 0)
    for name, error in errors.items():
        output.note(f"{name}: {error.message}")


def _read(client: Client, listing: _Listing, *, whole: bool) -> tuple[list[Run], int]:
    """Read what to list, and how many runs were left out of it: -1 for some.

    whole: whether the usual limit does not count.
    """
    keys = [name for name in listing.columns if name not in COLUMNS]  # the daemon has to be asked for these
    if listing.queue:  # the runs that wait, in the order of the queue unless another one was asked for
        waiting = client.select(replace(listing.selection, state=["queued"]), keys=keys, sort=listing.sort)
        if not listing.sort:
            waiting.sort(key=lambda run: (0, run.queue.place) if run.queue else (1, run.created_at))
        complete = _filled(client, waiting[: listing.limit], listing.columns)
        return complete, -1 if listing.limit and len(waiting) > listing.limit else 0
    usual = 0 if listing.everything or whole or listing.fold else _SHOWN
    if listing.selection.is_everything and not (listing.columns or listing.sort or listing.limit):
        runs = client.list(all=listing.everything, limit=usual and usual + 1)
        if usual and len(runs) > usual and runs[-1].state == "ended":
            return runs[:-1], sum(client.status().runs.values()) - len(runs) + 1
        return runs, 0
    limit = listing.limit or usual
    runs = client.select(
        listing.selection,
        recent=listing.selection.is_everything and not listing.everything,
        keys=keys,
        sort=listing.sort,
        limit=limit and limit + 1,
    )
    more = bool(limit) and len(runs) > limit
    complete = _filled(client, runs[:limit] if more else runs, listing.columns)
    return complete, -1 if more else 0


def _filled(client: Client, runs: list[Run], columns: Sequence[str]) -> list[Run]:
    """Add what pools and the bill know, where a column shows it."""
    if not set(FILLED) & {*columns}:
        return runs
    devices = devices_of(client.pools()) if "device" in columns else {}
    rows = client.bill().rows if "cost" in columns else []
    costs = {row.key: row.cost for row in rows if row.cost is not None}
    return [filled(run, devices, costs) for run in runs]


def _show(runs: Sequence[Run], listing: _Listing, more: int) -> None:
    if not runs and listing.queue:
        output.note("No run waits for its start.")
    elif not runs and not listing.selection.is_everything:
        output.note("No run is like that.")
    else:
        show(runs, listing.columns, fold=listing.fold, usual=OF_QUEUE if listing.queue else USUAL)
    if more > 0:
        output.note(f"{more} older ones: `lorad list --all` shows every run.")
    elif more and listing.limit is None:
        output.note("There are more: --all shows every one of them, --limit so many.")
