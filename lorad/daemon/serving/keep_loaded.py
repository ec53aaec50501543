"""Keep pinned and aliased versions loaded: each pool that is up keeps those of its base, and no others."""

import time

from lorad.daemon.context import Context
from lorad.daemon.guarded import each, of_pool
from lorad.daemon.pool import KeepRefusal, Pool
from lorad.daemon.pools.as_owner import connection_to, in_thread
from lorad.daemon.pools.life import ask_status
from lorad.daemon.queue.setups import base_of
from lorad.daemon.queue.tenants import room_in
from lorad.daemon.runs.bases import refuse_other_base
from lorad.daemon.serving.borrow_pool import attested, load_of, waited_for
from lorad.errors import LoradError
from lorad.protocol.calls import LetGo
from lorad.store import events, runs
from lorad.store.rows import VersionRow
from lorad.store.versions import exists, held_versions

_FIRST_PAUSE = 5.0  # seconds before a pool is asked again for what it refused; doubles
_LONGEST_PAUSE = 3600.0  # seconds


def keep_loaded(ctx: Context) -> None:
    """Begin to load versions that lack and to unload others, in every pool that needs it."""
    each(ctx, _keep_loaded_in, list(ctx.pools.values()), of_pool)


def _keep_loaded_in(ctx: Context, pool: Pool) -> None:
    """Look at a pool that has answered, or since what is served has changed: find what it is to load, the
    most important first, as far as there is room, and what to unload. Warns about versions that do not fit
    beside the pool's runs.
    """
    if pool.state != "ready" or pool.status is None:
        pool.refusals.clear()
        return
    seen = pool.polled_at, ctx.serving.served
    if pool.held_at == seen or pool.is_holding:
        return
    loaded = set(pool.status.kept)
    served = held_versions(ctx.store)
    spare = sorted(loaded - {row.name for row in served} - set(ctx.serving.in_hand))
    refused = {name for name, refusal in pool.refusals.items() if time.monotonic() < refusal.not_before}
    missing = [row for row in served if row.name not in loaded | refused]
    base_of_run = {name: base_of(ctx, runs.get(ctx.store, name)) for name in {row.run for row in missing}}
    at_home = {name for name, base in base_of_run.items() if base is not None and pool.setup.serves(base)}
    lacking = []
    room = room_in(pool, runs.active_in(ctx.store, pool.id))
    versions = room.versions
    memory = room.memory_used
    for row in (row for row in missing if row.run in at_home):
        if row.name not in pool.status.loaded:
            is_short = bool(room.memory) and memory + row.bytes > room.memory
            if is_short or versions >= room.max_versions:
                _warn_once(ctx, pool, row, "it has no room left beside its runs")
                continue
            versions += 1
            memory += row.bytes
        lacking.append(row)
    pool.held_at = seen
    if lacking or spare:
        pool.is_holding = True
        ctx.spawn(_settle(ctx, pool, lacking, spare))


async def _settle(ctx: Context, pool: Pool, lacking: list[VersionRow], spare: list[str]) -> None:
    """Unload and load versions in a pool. What it refuses is tried again later, ever more rarely."""
    try:
        if spare:
            await in_thread(ctx, pool.setup.owner, _let_go, ctx, pool, spare)
        for row in lacking:
            try:
                refuse_other_base(ctx, runs.get(ctx.store, row.run), pool)
                owner = pool.setup.owner
                load = load_of(row, keep=True)
                attestation = await in_thread(ctx, owner, attested, ctx, pool, "load_version", load)
                if attestation.verdict == "failed":
                    raise LoradError(attestation.detail)
                pool.refusals.pop(row.name, None)
            except LoradError as error:
                if pool.state == "ready":
                    times = pool.refusals[row.name].times + 1 if row.name in pool.refusals else 1
                    pause = min(_FIRST_PAUSE * 2.0 ** (times - 1), _LONGEST_PAUSE)
                    pool.refusals[row.name] = KeepRefusal(times, time.monotonic() + pause)
                    _warn_once(ctx, pool, row, error.message)
        await ask_status(ctx, pool)
    except (LoradError, OSError):
        pass  # the pool ended, which `watch_pools` sees
    finally:
        pool.is_holding = False
        ctx.loop.poke()


def _let_go(ctx: Context, pool: Pool, names: list[str]) -> None:
    """Let the pool unload versions. Runs in a thread."""
    with connection_to(ctx, pool) as connection, waited_for(ctx, connection):
        for name in names:
            connection.call("let_go", LetGo(name))


def _warn_once(ctx: Context, pool: Pool, row: VersionRow, why: str) -> None:
    """Warn the run of a version that it is not kept loaded, unless the last warning said the same."""
    name = row.name
    why_kept = "pinned" if row.pinned else f"served as {', '.join(row.aliases)}"
    message = f"{name} is {why_kept}, but pool {pool.id} does not keep it loaded: {why}"
    if pool.warned.get(name) != message and exists(ctx.store, row.run, row.version):
        events.append(ctx.store, row.run, "warning", {"message": message})
    pool.warned[name] = message
