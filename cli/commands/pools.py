"""The commands that list pools, devices and nodes, and the bill of who used them."""

import re
import sys
import time
from datetime import datetime, timedelta
from typing import Annotated, Literal

import typer

from lorad.cli import candidates, output, table
from lorad.cli.options import AsJson, Watch
from lorad.client import launch, words
from lorad.client.client import Client
from lorad.errors import SpecError
from lorad.records.bill import BillLine
from lorad.records.devices import Device
from lorad.records.pools import Pool, PoolEngine
from lorad.records.requests import ReserveRequest
from lorad.selection import seconds_in

pools_app = typer.Typer(add_completion=False)
devices_app = typer.Typer(add_completion=False)

_POOLS = table.columns("pool, state, model 3, device 4, threads 8, runs 1, versions 5, memory 6, idle 7")
_SHOWN = 3  # names of runs in a row
_ENGINES = table.columns("pool, engine, mode 3, state, busy 1, slots 4, hits 5, tok/s 2")
_DEVICES = table.columns("device, name 3, used, total 1, busy 2, pool 4, user 5, since 6, why fold")
_NODES = table.columns("node, state, devices, free, agents 1, seen 3, bases 2 cut, last word fold")
_LOOK_SECONDS = 2  # between two looks
_NO_NODES = "No nodes: config.yaml has no cluster, or no pool had one yet (docs/cluster.md)."


@pools_app.callback(invoke_without_command=True)
def pools(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List pools: base, device, who uses them, what they have loaded; and their engines.

    runs: how many, and which.
    versions: loaded or about to be, of those that fit.
    busy: samples that are being decoded, and after the + those that wait.
    slots: versions at once, of those that fit.
    hits: share of the prompt tokens of the last minute that were computed before.
    """
    if ctx.invoked_subcommand is not None:
        return
    rows = Client().pools()
    if as_json:
        output.print_json(rows)
        return
    cells = [
        (
            row.pool,
            row.state,
            row.model,
            first_few(row.nodes) or first_few(row.devices) or row.device,
            row.threads,
            first_few(row.tenants),
            versions_in(row),
            output.size(row.memory_bytes),
            output.duration(row.idle_seconds),
        )
        for row in rows
    ]
    output.print_table(_POOLS, cells, empty="No pools.")
    for row in rows:
        if row.waiting:
            output.note(f"{row.pool} {row.waiting}")
    engines = [(row, row.engine) for row in rows if isinstance(row.engine.alive, bool)]
    if not engines:
        return
    print()
    output.print_table(_ENGINES, [engine_row(row, engine) for row, engine in engines], empty="")
    for row, engine in engines:
        if engine.detail:
            output.report(f"{row.pool}: {engine.detail}")


@pools_app.command()
def stop(
    pool: Annotated[
        str, typer.Argument(metavar="POOL", help="A pool's name.", autocompletion=candidates.pools)
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also while runs are at work in it: they end, and can be resumed.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it has ended and its devices are free.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """End a pool, and free its devices. It is refused while runs or requests use the pool, and names them."""
    client = Client()
    row = client.stop_pool(pool, force=force)
    while wait and any(living.pool == pool for living in client.pools()):
        time.sleep(0.1)
    says = "has ended, and its devices are free" if wait else f"is {row.state}"
    output.note_or_json(row, f"Pool {pool} {says}.", as_json=as_json)


def first_few(names: list[str]) -> str:
    """Write the first few names, and how many there are: `a`, `3: a, b, c`, `8: a, b, c, …`."""
    shown = ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])
    return shown if len(names) < 2 else f"{len(names)}: {shown}"


def versions_in(pool: Pool) -> str:
    capacity = pool.capacity
    return f"{capacity.versions}/{capacity.max_versions}" if capacity else str(len(pool.loaded))


def engine_row(pool: Pool, engine: PoolEngine) -> tuple[str, ...]:
    return (
        pool.pool,
        " ".join(filter(None, (engine.name, engine.software or ""))),
        pool.mode,
        "lost" if not engine.alive else "asleep" if engine.asleep else "awake",
        f"{engine.running}+{engine.waiting}" if engine.waiting else str(engine.running),
        f"{engine.slots_used or 0}/{engine.slots}" if isinstance(engine.slots, int) else "",
        f"{100 * engine.prefix_hits:.0f}%" if isinstance(engine.prefix_hits, float) else "",
        output.number(pool.engine_tokens_per_second, 0),
    )


def bill(
    by: Annotated[
        Literal["run", "user", "sweep", "alias", "pool", "day"], typer.Option(help="What each line is of.")
    ] = "run",
    user: Annotated[str | None, typer.Option(help="Of this user's runs alone.")] = None,
    since: Annotated[
        str | None, typer.Option(help="From this hour on: a day, a time, or 36h, 7d, 2w.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="To before this hour.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all figures as CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say who used how much of devices, tokens, energy and disk, and what it costs (`prices` in config.yaml).

    held: time on a device; of a pool that several runs share, each has the time of its own work and an equal
        part of the time in which nobody worked.
    busy: time of its work.
    wasted: the part of held that a resume threw away.
    sampled, trained, served: tokens.
    cached: share of the tokens of prompts that were computed before.
    (nobody): pools were warm without a run, started, or worked for themselves.
    """
    import csv

    from lorad.cli.bill import print_bill, time_of

    answer = Client().bill(by, user=user, since=time_of("--since", since), until=time_of("--until", until))
    if as_json:
        output.print_json(answer)
    elif as_csv:
        names = [name for name in BillLine.__struct_fields__ if name != "key"]
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([answer.by, *names, "currency"])
        for line in answer.rows:
            values = [getattr(line, name) for name in names]
            writer.writerow([line.key, *values, answer.currency])  # None is an empty cell
    else:
        print_bill(answer)


_Device = Annotated[
    str, typer.Argument(metavar="DEVICE", help="`cuda:0`, or its number.", autocompletion=candidates.devices)
]


@devices_app.callback(invoke_without_command=True)
def devices(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List devices, who holds them and why, who reserved them, and who else computes there."""
    if ctx.invoked_subcommand is not None:
        return
    rows = Client().devices()
    cells = map(device_row, rows)
    output.table_or_json(rows, _DEVICES, cells, empty="No devices.", as_json=as_json)


@devices_app.command()
def reserve(
    device: _Device,
    lasting: Annotated[
        str | None, typer.Option("--for", help="How long from when it is free: 90m, 2h, 1d12h.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="18:00, 2026-11-30 or 2026-11-30T18:00.")] = None,
    why: Annotated[str, typer.Option(help="What others read of it.")] = "",
    now: Annotated[
        bool, typer.Option("--now", help="Runs there stop at their next step, and are queued again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a device from lorad, for work without it. It begins when the device is free.

    No run is placed there any more, of nobody. Runs that are there finish first; with --now they stop at
    their next step and continue elsewhere or later, exactly as they would have. It ends by itself, or with
    `lorad devices release`.
    """
    if lasting is not None and until is not None:
        raise SpecError("--for and --until contradict each other", hint="Give one of the two.")
    seconds = seconds_in("--for", lasting)
    end = None
    if until is not None:
        present = datetime.now()
        try:
            if re.fullmatch(r"\d{1,2}:\d{2}", until):  # the next one of that name
                clock = datetime.strptime(until, "%H:%M").time()
                today = datetime.combine(present.date(), clock)
                end = (today if today > present else today + timedelta(days=1)).timestamp()
            else:
                end = datetime.fromisoformat(until).timestamp()
        except (ValueError, OverflowError):
            hint = "Give a time of day (18:00), a day (2026-11-30), or both (2026-11-30T18:00)."
            raise SpecError(f"--until {until} is no time", hint=hint) from None
    request = ReserveRequest(seconds, end, why, now)
    row = launch.connected().reserve(device, request)
    if as_json:
        output.print_json(row)
        return
    output.note(f"{row.device} is {words.reserved(row)}.")
    if row.reservation and row.reservation.holder:
        way = f"`lorad devices reserve {row.device} --now` asks its runs to stop at their next step."
        output.note(f"{row.reservation.holder}. {'Its runs stop at their next step.' if now else way}")


@devices_app.command()
def release(device: _Device, as_json: AsJson = False) -> None:
    """Let lorad use a device again that was reserved."""
    row = launch.connected().release(device)
    output.note_or_json(row, f"{row.device} is lorad's again.", as_json=as_json)


def device_row(row: Device) -> tuple[str, ...]:
    lease = row.lease
    load = row.utilization
    why = lease.why if lease else ""
    if lease and lease.free_after is not None:
        why += f", free after {output.duration(lease.free_after)} idle"
    if lease and row.part:
        why += f"; its {row.part} alone"
    return (
        row.device,
        row.name,
        output.size(row.memory_used if row.memory_total else None),
        output.size(row.memory_total or None),
        "" if load is None else f"{load:.0%}",
        (lease.pool if lease else None) or row.pool or "",
        lease.user if lease else "",
        output.age(lease.since if lease else None),
        "; ".join(part for part in (why, words.set_aside(row), *strangers(row)) if part),
    )


def strangers(row: Device) -> list[str]:
    """Describe the processes on a device that are no part of a pool of this daemon."""
    return [
        f"{process.name or 'unseen'} (pid {process.pid}, {process.user or 'unknown user'}"
        + (f", {output.size(process.memory)})" if process.memory is not None else ")")
        for process in row.processes
        if not process.ours
    ]


def nodes(watch: Watch = False, as_json: AsJson = False) -> None:
    """List the nodes of the cluster: devices, which of them are free, who has them, which bases were loaded.

    free: devices that no pool of this daemon has; others may.
    agents: pools that have the node, each with its life.
    """
    client = Client()
    while True:
        rows = client.nodes()
        if as_json:
            output.print_json(rows, in_line=watch)
        else:
            if watch:
                print("\x1b[H\x1b[2J", end="")
            cells = [
                (
                    node.node,
                    node.state,
                    str(node.count) if node.count else "cpu" if node.devices else "",
                    str(node.free) if node.count else "",
                    ", ".join(node.agents),
                    output.age(node.seen_at),
                    ", ".join(base.rstrip("/").rpartition("/")[2] for base in reversed(node.bases)),
                    node.says,
                )
                for node in rows
            ]
            output.print_table(_NODES, cells, empty=_NO_NODES)
            for pool in client.pools():
                if pool.waiting:
                    output.note(f"{pool.pool} {pool.waiting}")
        if not watch:
            return
        time.sleep(_LOOK_SECONDS)
