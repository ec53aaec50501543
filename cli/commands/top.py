"""lorad top: what the dashboard shows, in plain tables."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from lorad.alarms import Alarm, AlarmLimits, alarms
from lorad.cli.commands import devices
from lorad.cli.commands.pools import runs_in, versions_in
from lorad.cli.options import AsJson
from lorad.cli.output import duration, json_text, note, number, print_json, print_table, run_row, shortened, size
from lorad.cli.settings import config_of
from lorad.client import Client
from lorad.tui.widgets.sparkline import sparkline

app = typer.Typer(add_completion=False)

Json = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[object]]]

SPARK = 12  # steps whose rewards are drawn
SECONDS = 2  # between two looks
MOST = 50  # runs that ended, without a terminal that says how many fit
ORDER = ("running", "starting", "stopping", "queued", "paused", "ended")
# Columns, and how wide a terminal has to be for each.
RUNS = {"name": 0, "state": 0, "step": 0, "reward": 40, "tok/s": 50, "version": 70, "eval": 90, "owner": 100}
RUNS |= {"age": 110, "recent": 80, "why": 60}
POOLS = {"pool": 0, "state": 0, "model": 60, "runs": 40, "phase": 90, "versions": 70, "sampled": 50, "trained": 50}
POOLS |= {"memory": 100, "idle": 110}
DEVICES = {"device": 0, "used": 0, "total": 60, "busy": 0, "pool": 40, "user": 70, "others": 80}
FOLDED, GAP = {"why": 12, "what": 12}, 2  # cells: of columns that may be cut, between two
ALARMS = {"": 0, "about": 0, "alarm": 0, "what": 0}
SIGNS = {"bad": "!!", "look": "!"}


@app.command()
def top(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every 2 seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Runs, pools, devices and alarms at a glance; with --watch --json one line of JSON each time.

    sampled, trained: tokens per second. An alarm with !! is of something broken.
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


def look(client: Client, limits: AlarmLimits) -> tuple[Json, Sequence[Alarm]]:
    """One after the other: together they take a few milliseconds."""
    found: Json = {
        "status": client.status(),
        "runs": sorted(client.list(limit=MOST), key=lambda run: ORDER.index(run["state"])),
        "pools": client.pools(),
        "devices": client.devices(),
        "at": time.time(),
    }
    about = {key: found[key] for key in ("pools", "devices", "status")}
    return found, alarms(found["runs"], limits, found["at"], **about)


def tell(found: Json, told: Sequence[Alarm], watch: bool) -> None:
    shown = {key: found[key] for key in ("runs", "pools", "devices")}
    shown |= {"alarms": msgspec.to_builtins(told), "at": found["at"]}
    if watch:
        print(json_text(shown), flush=True)
    else:
        print_json(shown)


def show(found: Json, told: Sequence[Alarm], watch: bool) -> None:
    width, lines = room()
    below = [
        fitting(POOLS, [pool_row(pool) for pool in found["pools"]], width),
        fitting(DEVICES, [device_row(device) for device in found["devices"]], width),
        fitting(ALARMS, [alarm_row(alarm) for alarm in told], width),
    ]
    rows = [run_cells(run) for run in found["runs"]]
    least = sum(1 for run in found["runs"] if run["state"] in ORDER[:4])
    free = lines - 5 - sum(len(rows) + 2 for _, rows in below if rows)
    shown = rows[: max(free, least, 3)] if lines else rows
    if watch:
        print("\x1b[H\x1b[2J", end="")
    print(headline(found))
    print()
    folded = () if lines else ("why",)
    print_table(*fitting(RUNS, shown, width), empty="No runs. `lorad init` writes a spec to start from.", folded=folded)
    if (more := sum(found["status"]["runs"].values()) - len(shown)) > 0 and rows:
        note(f"{more} more: `lorad list --all` shows every run.")
    for columns, some in below:
        if some:
            print()
            print_table(columns, some, empty="")
    sys.stdout.flush()


def room() -> tuple[int, int]:
    """Columns and lines of the terminal; no limit of lines where there is none."""
    if not sys.stdout.isatty():
        return 200, 0
    columns, lines = shutil.get_terminal_size((80, 24))
    return columns, lines


def fitting(columns: dict[str, int], rows: Sequence[Sequence[object]], width: int) -> Table:
    """The columns that a terminal of this width has room for, with what stands in them."""
    names, leasts = list(columns), list(columns.values())
    needs = [max(len(name), *(len(str(row[place] or "")) for row in rows), 0) for place, name in enumerate(names)]
    kept = [place for place, least in enumerate(leasts) if width >= least]
    while sum(min(needs[place], FOLDED.get(names[place], width)) + GAP for place in kept) > width + GAP:
        if not leasts[last := max(kept, key=lambda place: leasts[place])]:
            break
        kept.remove(last)
    return [names[place] for place in kept], [[row[place] for place in kept] for row in rows]


def headline(found: Json) -> str:
    status = found["status"]
    counts = [f"{status['runs'][state]} {state}" for state in ORDER if status["runs"].get(state)]
    disk = [f"{size(status['disk']['free'])} free"] if status.get("disk") else []
    return "  ".join(["lorad", time.strftime("%H:%M:%S", time.localtime(found["at"])), ", ".join(counts), *disk])


def run_cells(run: Json) -> Sequence[object]:
    """In the order of RUNS."""
    name, state, step, reward, evals, version, rate, owner, age, why = run_row(run)
    recent = sparkline(run.get("recent"), SPARK)
    return name, state, step, reward, rate, version, evals, shortened(owner, 16), age, recent, shortened(why, 60)


def pool_row(pool: Json) -> Sequence[object]:
    phases = [str(run["phase"]) for run in pool["runs"] if run["phase"] != "idle"]
    return (
        pool["pool"],
        pool["state"],
        os.path.basename(str(pool["model"])) or pool["model"],
        runs_in(pool["tenants"]),
        ", ".join(dict.fromkeys(phases)) or "idle",
        versions_in(pool),
        number(pool["engine_tokens_per_second"], 0),
        number(pool["trainer_tokens_per_second"], 0),
        size(pool.get("memory_bytes")),
        duration(pool.get("idle_seconds") or 0),
    )


def device_row(device: Json) -> Sequence[object]:
    """As `lorad devices` has it, with only the processes of others beside it."""
    name, _, *figures, _, _ = devices.device_row(device)
    return name, *figures, "; ".join(devices.strangers(device))


def alarm_row(alarm: Alarm) -> Sequence[object]:
    return SIGNS[alarm.level], alarm.subject or alarm.on, alarm.kind, alarm.says
