"""Find the version that a request names, and keep its files while they are needed."""

import asyncio
import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from lorad.adapters.directory import verify
from lorad.adapters.peft import WEIGHTS
from lorad.daemon.access import find_run, sees
from lorad.daemon.context import Context, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import refresh
from lorad.daemon.process.users import Caller
from lorad.errors import Conflict, IntegrityError, NotFound, SpecError
from lorad.states import RunState
from lorad.store import aliases, runs
from lorad.store.metrics import best_evals
from lorad.store.rows import VersionRow
from lorad.store.versions import get_version, of_step

# what may stand in place of a number
_BEST = "best"
_LATEST = "latest"
_OF_STEP = re.compile(r"step:([0-9]{1,9})")
_WRITE_SECONDS = 20.0  # in which a pool writes the files of a version, which its run does not wait for
_POLL_SECONDS = 0.05


def find_version(ctx: Context, caller: Caller, name: str) -> VersionRow:
    """Find a version by `run@number`, as the one that a step made (`run@step:80`), as the best of a run
    (`run@best`), by an alias, or as a run's current one (`run`, `run@latest`); an alias goes before a run.

    Raises SpecError, and NotFound, also for a run that the caller may not see.
    """
    run_name, at, which = name.partition("@")
    step = _OF_STEP.fullmatch(which)
    if at:
        if which not in (_BEST, _LATEST) and not (step or re.fullmatch(r"[0-9]{1,9}", which)):
            hint = "A version is written run@number, as in sorter@12, or run@step:80, run@best, run@latest."
            raise SpecError(f"{name} is not a version", hint=hint)
        run = find_run(ctx, caller, run_name)
    else:
        alias = aliases.find(ctx.store, name)
        meant = [(alias.run, str(alias.version))] if alias else []
        for run_name, number in (*meant, (name, _LATEST)):
            named = runs.find(ctx.store, run_name)
            if named is not None and sees(ctx, caller, named.owner_uid):
                run = named
                which = number
                break
        else:
            hint = "`lorad aliases` and `lorad list --all` show what there is."
            raise NotFound(f"no alias and no run is named {name}", hint=hint)
    if which == _BEST:
        _, evals = best_evals(ctx.store, run.name, spec_of(run).checkpoint.best_by)
        if not evals:
            hint = f"`lorad show {run.name}` shows what it measured; checkpoint.best_by says what counts."
            raise NotFound(f"run {run.name} has no evaluation, so that no version is its best", hint=hint)
        which = str(evals[0].version)
    if which == _LATEST:
        if run.version is None:
            hint = f"`lorad logs {run.name}` shows how far it is."
            raise NotFound(f"run {run.name} has no version yet", hint=hint)
        which = str(run.version)
    if step:
        return of_step(ctx.store, run.name, int(step[1]))
    return get_version(ctx.store, run.name, int(which))


@contextlib.contextmanager
def in_hand(ctx: Context, version: VersionRow) -> Iterator[None]:
    """Protect a version while a request uses it: its files are not deleted and no pool unloads it."""
    name = version.name
    ctx.serving.in_hand[name] += 1
    try:
        yield
    finally:
        ctx.serving.in_hand[name] -= 1
        if not ctx.serving.in_hand[name]:
            del ctx.serving.in_hand[name]


def is_loaded(ctx: Context, version: VersionRow) -> bool:
    """Check whether the engine of a pool has the version loaded, by the pool's last status."""
    name = version.name
    return any(name in pool.status.loaded for pool in believed_pools(ctx, version.owner_uid) if pool.status)


def believed_pools(ctx: Context, owner_uid: int) -> list[Pool]:
    """List the pools that are believed about a user's versions: not those of others in a shared daemon."""
    return [pool for pool in list(ctx.pools.values()) if ctx.users.is_believed(pool.setup.owner, owner_uid)]


def has_files(path: str | Path) -> bool:
    """Check whether a version or checkpoint has a directory; a link of its owner does not count."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


async def await_files(ctx: Context, version: VersionRow) -> None:
    """Wait until the pool that has the version has written its directory. Raises Conflict if none will."""
    deadline = time.monotonic() + _WRITE_SECONDS
    if not has_files(version.path):
        await refresh(ctx)
    while not has_files(version.path):
        run = runs.get(ctx.store, version.run)
        is_current = RunState(run.state).is_active and run.version == version.version
        # the run, or the pool that has it loaded, may still write them
        if time.monotonic() > deadline or not (is_current or is_loaded(ctx, version)):
            raise files_gone(version)
        await asyncio.sleep(_POLL_SECONDS)


async def await_bytes(ctx: Context, version: VersionRow) -> None:
    """Wait until a pool can serve the version, from memory or its files. Raises Conflict without both."""
    if not is_loaded(ctx, version):
        await await_files(ctx, version)


def files_gone(version: VersionRow) -> Conflict:
    hint = (
        f"`lorad adapters {version.run}` shows which versions have theirs; checkpoint.keep_versions says how "
        "many stay, checkpoint.keep_best keeps the best."
    )
    return Conflict(f"the files of {version.name} are gone: {version.path}", hint=hint)


def check_files(version: VersionRow) -> None:
    """Hash its files again. Raises IntegrityError unless the tensors have the sha256 of the version."""
    path = Path(version.path)
    weights = verify(path).get(WEIGHTS)
    if weights is None or weights.sha256 != version.sha256:
        what = f"its tensors have sha256 {weights.sha256}" if weights else f"there is no {WEIGHTS}"
        hint = "Its files were replaced; use another version."
        raise IntegrityError(f"{path}: {what}, {version.name} is {version.sha256}", hint=hint)
