"""lorad top: what the dashboard shows, in plain tables."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from lorad.alarms import Alarm, alarms
from lorad.box.config import AlarmLimits
from lorad.cli.commands import devices
from lorad.cli.commands.pools import runs_in, versions_in
from lorad.cli.options import AsJson
from lorad.cli.output import NO_RUNS, duration, json_text, note, number, print_json, run_row, size
from lorad.cli.settings import config_of
from lorad.cli.table import Column, folded_as_is, print_table, terminal_width
from lorad.client.box_shapes import Device, Pool, Status
from lorad.client.client import Client
from lorad.client.shapes import Run
from lorad.tui.widgets.sparkline import sparkline

app = typer.Typer(add_completion=False)


SPARK = 12  # steps whose rewards are drawn
SECONDS = 2  # between two looks
MOST = 50  # runs that ended, without a terminal that says how many fit
ORDER = ("running", "starting", "stopping", "queued", "paused", "ended")
RUNS = (
    *(
        "name",
        "state",
        "step",
        Column("reward", 1),
        Column("tok/s", 3),
        Column("version", 5),
        Column("eval", 7),
    ),
    *(Column("owner", 8), Column("age", 9), Column("recent", 6), Column("why", 2, "cut")),
)
POOLS = (
    *("pool", "state", Column("model", 4), Column("runs", 1), Column("phase", 6), Column("versions", 5)),
    *(Column("sampled", 2), Column("trained", 3), Column("memory", 7), Column("idle", 8)),
)
DEVICES = (
    *("device", "used", Column("total", 3), "busy", Column("pool", 1), Column("user", 2)),
    Column("others", kind="cut"),
)
ALARMS = ("", "about", "alarm", Column("what", kind="cut"))
SIGNS = {"bad": "!!", "look": "!"}


@app.command()
def top(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat every 2 seconds, until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs, pools, devices and alarms at a glance; with --watch --json one line of JSON each time.

    sampled, trained: tokens per second. An alarm with !! means that something is broken.
    """
    client = Client()
    limits = config_of(client.home).alarms
    while True:
        found, told = look(client, limits)
        if as_json:
            tell(found, told, watch)
        else:
            show(found, told, watch)
        if not watch:
            return
        time.sleep(SECONDS)


class Look(NamedTuple):
    """A snapshot of what `lorad top` shows."""

    status: Status
    runs: list[Run]
    pools: list[Pool]
    devices: list[Device]
    at: float


def look(client: Client, limits: AlarmLimits) -> tuple[Look, Sequence[Alarm]]:
    """Take a snapshot. The requests run one after the other, as together they take a few milliseconds."""
    runs = sorted(client.list(limit=MOST), key=lambda run: ORDER.index(run.state))
    found = Look(client.status(), runs, client.pools(), client.devices(), time.time())
    return found, alarms(
        runs, limits, found.at, pools=found.pools, devices=found.devices, status=found.status
    )


def tell(found: Look, told: Sequence[Alarm], watch: bool) -> None:
    shown = {
        "runs": found.runs,
        "pools": found.pools,
        "devices": found.devices,
        "alarms": told,
        "at": found.at,
    }
    if watch:
        print(json_text(shown), flush=True)
    else:
        print_json(shown)


def show(found: Look, told: Sequence[Alarm], watch: bool) -> None:
    lines = lines_of_terminal()
    below = [
        (POOLS, [pool_row(pool) for pool in found.pools]),
        (DEVICES, [device_row(device) for device in found.devices]),
        (ALARMS, [alarm_row(alarm) for alarm in told]),
    ]
    rows = [run_cells(run) for run in found.runs]
    least = sum(1 for run in found.runs if run.state in ORDER[:4])
    free = lines - 5 - sum(len(rows) + 2 for _, rows in below if rows)
    shown = rows[: max(free, least, 3)] if lines else rows
    if watch:
        print("\x1b[H\x1b[2J", end="")
    print(*folded_as_is(headline(found), terminal_width() or 1000), sep="\n")
    print()
    print_table(RUNS, shown, empty=NO_RUNS, single=True)
    if (more := sum(found.status.runs.values()) - len(shown)) > 0 and rows:
        note(f"{more} more: `lorad list --all` shows every run.")
    for columns, some in below:
        if some:
            print()
            print_table(columns, some, empty="", single=True)
    sys.stdout.flush()


def lines_of_terminal() -> int:
    """0: no limit, where there is none."""
    return 0 if terminal_width() is None else shutil.get_terminal_size((80, 24)).lines


def headline(found: Look) -> str:
    status = found.status
    counts = [f"{status.runs[state]} {state}" for state in ORDER if status.runs.get(state)]
    disk = [f"{size(status.disk.free)} free"] if status.disk else []
    return "  ".join(["lorad", time.strftime("%H:%M:%S", time.localtime(found.at)), ", ".join(counts), *disk])


def run_cells(run: Run) -> Sequence[object]:
    """Return the cells of a run in the order of RUNS."""
    name, state, step, reward, evals, version, rate, owner, age, why = run_row(run)
    return name, state, step, reward, rate, version, evals, owner, age, sparkline(run.recent, SPARK), why


def pool_row(pool: Pool) -> Sequence[object]:
    phases = [run.phase for run in pool.runs if run.phase != "idle"]
    return (
        pool.pool,
        pool.state,
        os.path.basename(pool.model) or pool.model,
        runs_in(pool.tenants),
        ", ".join(dict.fromkeys(phases)) or "idle",
        versions_in(pool),
        number(pool.engine_tokens_per_second, 0),
        number(pool.trainer_tokens_per_second, 0),
        size(pool.memory_bytes),
        duration(pool.idle_seconds),
    )


def device_row(device: Device) -> Sequence[object]:
    """Return the row of `lorad devices`, shortened to the figures and the processes of others."""
    name, _, *figures, _, _ = devices.device_row(device)
    return name, *figures, "; ".join(devices.strangers(device))


def alarm_row(alarm: Alarm) -> Sequence[object]:
    return SIGNS[alarm.level], alarm.subject or alarm.on, alarm.kind, alarm.says
