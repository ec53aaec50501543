"""The samples of one step, from their own hashed file."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from lorad.daemon.context import Context, run_dir
from lorad.daemon.request import Call
from lorad.errors import IntegrityError, NotFound
from lorad.store import runs


async def handle(ctx: Context, call: Call) -> list[dict[str, Any]]:
    """Of `step`, else of the last one, if there is one. Raises NotFound, IntegrityError."""
    run = runs.get(ctx.store, call.run)
    step = call.number("step", run["step"])
    if call.text("step") is None and step == 0:
        return []
    row = ctx.store.row(
        "SELECT samples, samples_sha256 FROM steps WHERE run = ? AND step = ? AND lineage = 1 ORDER BY attempt DESC",
        (call.run, step),
    )
    if row is None:
        raise NotFound(f"run {call.run} has no step {step}", hint=f"Its last step is {run['step']}.")
    path = run_dir(run).root / row["samples"]
    return await asyncio.to_thread(read, path, row["samples_sha256"], call.number("limit", 1000))


def read(path: Path, sha256: str, limit: int) -> list[dict[str, Any]]:
    """The first `limit` samples of a whole file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFound(
            f"{path}: {error.strerror}", hint="checkpoint.keep_samples says how many steps keep theirs."
        ) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise IntegrityError(f"{path}: changed bytes: its sha256 is not that of the journal", hint="Do not rely on it.")
    return [msgspec.json.decode(line) for line in data.splitlines()[: max(limit, 0)]]
