"""Keep a pool up for each base that is served, whenever devices are free for it."""

import time
from collections.abc import Iterable

from lorad.daemon.context import Context
from lorad.daemon.guarded import each, of_run
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import look_at_process
from lorad.daemon.queue.place import pool_for
from lorad.daemon.queue.setups import base_of
from lorad.errors import LoradError
from lorad.states import RunState
from lorad.store import events, runs
from lorad.store.rows import RunRow

_FIRST_PAUSE = 2.0  # seconds before a pool that ended by itself is started again; doubles
_LONGEST_PAUSE = 300.0  # seconds


def keep_serving(ctx: Context) -> None:
    """Keep the pool of every run that serves up; note at the run why it is not."""
    serves: dict[str, set[str]] = {}

    def keep_run_serving(ctx: Context, run: RunRow) -> None:
        pool = ctx.pools.get(run.pool or "")  # the one that served it last, if it is up
        if pool is not None:
            look_at_process(ctx, pool)
            if not pool.process.is_up or pool.stop_asked is not None:
                pool = None
            elif pool.state == "ready":  # when it ends, the pause is short again
                ctx.serving.pauses.pop(run.name, None)
        waiting = ""
        if pool is None and RunState(run.state).is_over:
            pause, not_before = ctx.serving.pauses.get(run.name, (0.0, 0.0))
            if time.monotonic() < not_before:
                waiting = run.waiting or "its pool is started again soon"
            else:
                try:
                    pool = pool_for(ctx, run)
                except LoradError as error:
                    waiting = error.message
                else:
                    pause = min(max(_FIRST_PAUSE, 2 * pause), _LONGEST_PAUSE)
                    ctx.serving.pauses[run.name] = pause, time.monotonic() + pause
                    runs.set_fields(ctx.store, run.name, pool=pool.id)
        if pool is not None:
            serves.setdefault(pool.id, set()).add(run.name)
        if RunState(run.state).is_over and waiting != run.waiting:
            with ctx.store.write():
                runs.set_fields(ctx.store, run.name, waiting=waiting)
                facts = {"waiting": waiting, "pool": pool.id if pool else None}
                events.append(ctx.store, run.name, "serving", facts)

    each(ctx, keep_run_serving, runs.that_serve(ctx.store), of_run)
    for pool in ctx.pools.values():
        pool.serves = serves.get(pool.id, set())


def set_serving(ctx: Context, names: Iterable[str], pool: Pool) -> None:
    """Keep `pool`, or one like it, up for these runs."""
    for name in names:
        run = runs.get(ctx.store, name)
        pool.serves.add(name)
        base = base_of(ctx, run) if RunState(run.state).is_over else None
        is_home = base is not None and pool.setup.serves(base)
        columns = {"pool": pool.id, "waiting": ""} if is_home else {}
        runs.set_fields(ctx.store, name, serving=1, **columns)
