"""What `lorad gc` deletes: all that nothing can ask for, of runs, of pools and of what was removed."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator

from lorad.daemon.context import Context
from lorad.daemon.process.processes import attempts_under, is_locked
from lorad.daemon.storage.bundles import unused_bundles
from lorad.daemon.storage.prune import REMOVED, Doomed, doomed, listed
from lorad.states import RunState
from lorad.store import events, runs
from lorad.store.rows import RunRow

ORPHAN_SECONDS = 3600.0  # a run's directory is there before its row
_LIVES = 3  # lives of a pool, and attempts of a run that is over, whose logs stay
_POOL_SECONDS = 7 * 24 * 3600.0  # a pool that ended is kept for so long


def all_doomed(ctx: Context, *, of: Callable[[RunRow], bool] | None = None) -> Iterator[Doomed]:
    """Yield everything that can be deleted.

    of: accepts the runs whose files can go; without it the files of all can, and those of pools and removed
        runs, and unused bundles.
    """
    for name in runs.names(ctx.store):
        run = runs.find(ctx.store, name)
        if run is not None and (of is None or of(run)):
            yield from doomed(ctx, run)
            yield from _old_logs(run)
    if of is None:
        yield from _orphans(ctx)
        yield from _old_pools(ctx)
        yield from unused_bundles(ctx)


def still_doomed(ctx: Context, run: str, items: Iterable[Doomed]) -> list[Doomed]:
    """Keep the items of a run that nothing has asked for since they were found.

    run: its name, or "" for items that belong to no run. Delete what is returned before anything is awaited.
    """
    now: Iterable[Doomed] = ()
    if not run:
        now = (*_orphans(ctx), *_old_pools(ctx), *unused_bundles(ctx))
    elif row := runs.find(ctx.store, run):
        now = (*doomed(ctx, row), *_old_logs(row))
    doomed_now = {(item.kind, item.path) for item in now}
    return [item for item in items if (item.kind, item.path) in doomed_now]


def _old_logs(run: RunRow) -> Iterator[Doomed]:
    """Find the logs of attempts of a run that is over, except the newest few attempts."""
    if not RunState(run.state).is_over:
        return
    for attempt in list(attempts_under(run.dir.root))[:-_LIVES]:
        if int(attempt.root.name) < run.attempt and not is_locked(attempt):
            for directory in {attempt.root: None, attempt.work: None}:  # they may be the same
                for path in listed(directory):
                    if path.is_file() and (path.name == "log" or path.name.endswith(".log")):
                        yield Doomed(run.name, path, "log", f"logs of the newest {_LIVES} attempts stay")


def _orphans(ctx: Context) -> Iterator[Doomed]:
    """Find directories of removed runs. Others stay, even unknown ones: the database may be an old one."""
    names = {*runs.names(ctx.store)}
    for path in sorted(ctx.runs_root.iterdir()):
        is_removed = path.name.startswith(REMOVED)
        if not is_removed and path.name not in names and events.has_kind(ctx.store, path.name, "removed"):
            is_removed = path.is_dir() and time.time() - path.stat().st_mtime > ORPHAN_SECONDS
        if is_removed:
            yield Doomed("", path, "run", "its run was removed")


def _old_pools(ctx: Context) -> Iterator[Doomed]:
    """Find all but the newest lives of pools, and old pools that no run will resume in."""
    in_use = runs.pools_in_use(ctx.store)
    for pool in list(ctx.pools.values()):
        lives = list(attempts_under(pool.root))
        is_used = pool.process.is_up or pool.guests or pool.serves or pool.stop_asked is not None
        ended_at = math.inf
        if lives and not is_used and pool.id not in in_use and not any(is_locked(life) for life in lives):
            with contextlib.suppress(OSError):
                ended_at = lives[-1].status.stat().st_mtime
        if time.time() - ended_at > _POOL_SECONDS:
            why = f"the pool ended more than {_POOL_SECONDS / 86400:.0f} days ago"
            yield Doomed("", pool.root, "pool", why)
            continue
        for life in lives[:-_LIVES]:
            if not is_locked(life):
                yield Doomed("", life.root, "life", f"the newest {_LIVES} lives of pool {pool.id} stay")
