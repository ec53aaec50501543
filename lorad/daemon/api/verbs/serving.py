"""Bring up what the gateway needs for one model."""

from __future__ import annotations

from msgspec import Struct

from lorad.client.shapes import Serving
from lorad.daemon.access import must_see
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context, request_of
from lorad.daemon.runs.bases import refuse_other_base
from lorad.daemon.runs.versions import find_version, in_hand
from lorad.daemon.serving.borrow_pool import guest, is_chat, load
from lorad.store import runs


class Body(Struct):
    """An alias, run@number, or a run's name."""

    model: str


async def handle(ctx: Context, call: Call) -> Serving:
    """Raises NotFound, Conflict (no device, no files), PoolLost, and what the pool refuses."""
    model = call.json(Body).model
    version = find_version(ctx, model)
    run = must_see(ctx, call.caller, runs.get(ctx.store, version.run))
    with in_hand(ctx, version):
        async with guest(ctx, run) as pool:
            refuse_other_base(ctx, run, pool)
            await load(ctx, pool, version, keep=version.pinned or bool(version.aliases))
    return Serving(
        model=model,
        run=version.run,
        version=version.version,
        sha256=version.sha256,
        socket=pool.setup.socket,
        model_path=request_of(run).model_path,
        chat_template=await is_chat(ctx, run),
    )
