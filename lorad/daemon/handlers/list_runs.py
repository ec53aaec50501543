"""Runs, newest first."""

from __future__ import annotations

from typing import Any

from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.daemon.views import run_view
from lorad.store import runs


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    return [run_view(row) for row in runs.list_runs(ctx.store, all=call.number("all", 0) != 0)]
