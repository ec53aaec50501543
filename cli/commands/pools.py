"""lorad pools: base models that are kept warm."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson
from lorad.cli.output import duration, number, print_json, print_table, size
from lorad.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def pools(as_json: AsJson = False) -> None:
    """Pools: base, device, who uses them, what they have loaded."""
    rows = Client().pools()
    if as_json:
        print_json(rows)
        return
    cells = [
        (
            p["pool"],
            p["state"],
            p["model"],
            p["device"],
            p["threads"],
            ", ".join(t if isinstance(t, str) else t["run"] for t in p["tenants"]),
            len(p["loaded"]),
            number(p.get("engine_tokens_per_second"), 0),
            size(p.get("memory_bytes")),
            duration(p.get("idle_seconds") or 0),
        )
        for p in rows
    ]
    columns = ("pool", "state", "model", "device", "threads", "runs", "loaded", "tok/s", "memory", "idle")
    print_table(columns, cells, empty="No pools.")
