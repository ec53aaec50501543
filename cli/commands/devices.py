"""lorad devices: what there is to run on."""

from __future__ import annotations

import typer

from lorad.cli.options import AsJson
from lorad.cli.output import print_json, print_table, size
from lorad.client import Client

app = typer.Typer(add_completion=False)


@app.command()
def devices(as_json: AsJson = False) -> None:
    """Devices, their memory, and the pool that holds them."""
    rows = Client().devices()
    if as_json:
        print_json(rows)
        return
    cells = [(d["device"], d["name"], size(d["memory_used"]), size(d["memory_total"]), d["pool"] or "") for d in rows]
    print_table(("device", "name", "used", "total", "pool"), cells, empty="No devices.")
