"""Sweeps with their runs, newest first."""

from __future__ import annotations

import json
from typing import Any

from msgspec import convert

from lorad.client.shapes import Halving, Rung, Sweep, SweepRun
from lorad.daemon.access import Access, Subject, refuse, seen
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import extended, of_row, run_view
from lorad.daemon.context import Context
from lorad.store import runs, sweeps
from lorad.store.rows import SweepRow


async def handle(ctx: Context, call: Call) -> list[Sweep]:
    """List the sweep of that name, or all that the caller may see. Raises NotFound, NotAllowed."""
    name = call.text("sweep")
    rows = sweeps.sweeps(ctx.store) if name is None else [sweeps.get(ctx.store, name)]
    if name is not None:
        refuse(ctx, call.caller, Subject(f"sweep {name}", rows[0].owner_uid), Access.READ)
    return [sweep_view(ctx, row) for row in seen(ctx, call.caller, rows)]


def sweep_view(ctx: Context, row: SweepRow) -> Sweep:
    members = [runs.get(ctx.store, name) for name in sweeps.members(ctx.store, row.sweep)]
    grid = [*row.grid]
    shown = [extended(SweepRun, run_view(run), values=values(json.loads(run.spec), grid)) for run in members]
    halving = convert(row.halving, Halving | None, from_attributes=True)
    rungs = convert(row.rungs, list[Rung], from_attributes=True)
    return of_row(Sweep, row, halving=halving, rungs=rungs, runs=shown)


def values(spec: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Look up the values of a spec for dotted keys."""
    return {key: value(spec, key.split(".")) for key in keys}


def value(spec: Any, path: list[str]) -> Any:
    """Look a dotted key up; None where the path leads nowhere,
    as from `reward: exact_match` to reward.name.
    """
    for part in path:
        if not isinstance(spec, dict):
            return spec if part == "name" else None
        spec = spec.get(part)
    return spec
