"""lorad devices: what there is to run on."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson
from lorad.cli.output import age, duration, print_json, print_table, size
from lorad.cli.table import Column
from lorad.client.box_shapes import Device, Lease
from lorad.client.client import Client

app = typer.Typer(add_completion=False)
DEVICES = (
    *("device", Column("name", 3), "used", Column("total", 1), Column("busy", 2), Column("pool", 4)),
    *(Column("user", 5), Column("since", 6), Column("why", kind="fold")),
)


@app.command()
def devices(as_json: AsJson = False) -> None:
    """List devices, who holds them and why, and who else computes there."""
    rows = Client().devices()
    if as_json:
        print_json(rows)
        return
    print_table(DEVICES, [device_row(row) for row in rows], empty="No devices.")


def device_row(row: Device) -> tuple[str, ...]:
    lease = row.lease
    load = row.utilization
    return (
        row.device,
        row.name,
        size(row.memory_used),
        size(row.memory_total),
        "" if load is None else f"{load:.0%}",
        (lease.pool if lease else None) or row.pool or "",
        lease.user if lease else "",
        age(lease.since if lease else None),
        "; ".join(part for part in (held(lease), *strangers(row)) if part),
    )


def held(lease: Lease | None) -> str:
    if not lease:
        return ""
    after = lease.free_after
    return lease.why + (f", free after {duration(after)} idle" if after is not None else "")


def strangers(row: Device) -> list[str]:
    """Processes that are no part of a pool of this daemon."""
    others = [process for process in row.processes if not process.ours]
    return [
        f"{one.name or 'unseen'} (pid {one.pid}, {one.user or 'unknown user'}"
        + (f", {size(one.memory)})" if one.memory is not None else ")")
        for one in others
    ]
