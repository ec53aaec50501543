"""Delete checkpoints and version files that nothing can ask for, and leftovers of writers that died."""

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from lorad.adapters.directory import TEMPORARY, discard
from lorad.box.paths import RunDir
from lorad.daemon.context import Context, spec_of
from lorad.daemon.guarded import each
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.runs.versions import believed_pools, is_loaded
from lorad.daemon.state import bytes_of
from lorad.daemon.troubles import Item
from lorad.errors import Conflict, NotFound
from lorad.records.versions import Checkpoint
from lorad.states import RunState
from lorad.store import aliases, runs
from lorad.store.checkpoints import checkpoints, ever_made, mark_deleted
from lorad.store.metrics import best_evals
from lorad.store.rows import RunRow, VersionRow
from lorad.store.runs import attempts
from lorad.store.versions import get_version

log = logging.getLogger("lorad.daemon")

REMOVED = ".removed-"  # directories of runs that are gone
_CHECKPOINT = re.compile(r"([0-9]{6,12})-a([0-9]{1,6})")  # other names are users' own
_SAMPLES = re.compile(r"([0-9]{1,12})(?:-a([0-9]{1,6}))?")
VERSION = re.compile(r"[0-9]{1,12}")
LEFTOVER_SECONDS = 60.0  # a pool may still be writing what its dead driver asked for
LISTED = 32768  # names of a directory that are looked at
_AT_ONCE = 256  # files deleted after one checkpoint; the rest follows after the next


class Doomed(NamedTuple):
    """Files that nothing can ask for.

    run: whose they are; "" for files of no run.
    for_budget: they go only because the disk budget is used up.
    """

    run: str
    path: Path
    kind: Literal["checkpoint", "version", "samples", "leftover", "run", "log", "life", "pool", "bundle"]
    why: str
    for_budget: bool = False


def prune(ctx: Context, run: RunRow) -> None:
    """Delete what `checkpoint` of the spec does not keep. `prune_again` does what cannot be done now."""
    ctx.storage.unpruned.add(run.name)
    if not _may_be_pruned(run):
        return
    gone = [path for item in doomed(ctx, run)[:_AT_ONCE] if (path := delete(ctx, item)) is not None]

    async def discard_as_owner() -> None:
        with contextlib.suppress(Conflict):  # a user with too many requests: they go later, as leftovers
            await in_thread(ctx, run.owner_uid, discard_all, gone)

    if gone:
        ctx.spawn(discard_as_owner())
    if not _has_silent_pool(ctx, run):
        ctx.storage.unpruned.discard(run.name)
    if still_used := [version for version in _unkept_versions(ctx, run) if _is_in_use(ctx, version)]:
        ctx.storage.unkept[run.name] = still_used
    else:
        ctx.storage.unkept.pop(run.name, None)


def prune_again(ctx: Context) -> None:
    """Retry what could not be finished: `prune` failed, a pool did not answer, or an engine still held a
    version, which it has unloaded since.
    """

    def prune_run(ctx: Context, name: str) -> None:
        try:
            run = runs.get(ctx.store, name)
        except NotFound:
            ctx.storage.unpruned.discard(name)
            ctx.storage.unkept.pop(name, None)
            return
        if not _has_silent_pool(ctx, run):
            prune(ctx, run)

    unloaded = {
        name
        for name, unkept in ctx.storage.unkept.items()
        if any(not _is_in_use(ctx, version) for version in unkept)
    }
    each(ctx, prune_run, sorted(ctx.storage.unpruned | unloaded), lambda name: Item(f"run {name}"))


def _has_silent_pool(ctx: Context, run: RunRow) -> bool:
    """Check for a pool that has not answered this daemon yet: it may have loaded any version of the run."""
    return any(pool.process.is_up and pool.status is None for pool in believed_pools(ctx, run.owner_uid))


def discard_all(paths: Iterable[Path]) -> None:
    for path in paths:
        discard(path)


def _may_be_pruned(run: RunRow) -> bool:
    """Check that no attempt begins, which may read any file of the run."""
    return run.state in (RunState.RUNNING, RunState.PAUSED, RunState.ENDED) and run.resume_step is None


def doomed(ctx: Context, run: RunRow) -> list[Doomed]:
    if not _may_be_pruned(run):
        return []
    begun_at = time.time()  # an attempt may still write what it began
    if run.state == RunState.RUNNING:
        begun_at = max((attempt.started_at for attempt in attempts(ctx.store, run.name)), default=0.0)
    paths = leftovers_in(run.dir, before=begun_at)
    leftovers = [Doomed(run.name, path, "leftover", "its writer died") for path in paths]
    recorded = ever_made(ctx.store, run.name)
    staying = {(row.step, row.attempt) for row in _kept_checkpoints(ctx, run)}
    why = f"checkpoint.keep is {spec_of(run).checkpoint.keep}"
    old_checkpoints = []
    for path in listed(run.dir.checkpoints):
        key = key_of(path)
        is_on_its_way = key is not None and (run.name, *key) not in recorded and key[1] == run.attempt
        if key is not None and key not in staying and not is_on_its_way:
            old_checkpoints.append(Doomed(run.name, path, "checkpoint", why))
    why = f"checkpoint.keep_versions is {spec_of(run).checkpoint.keep_versions}"
    old_versions = [
        Doomed(run.name, run.dir.version(row.version), "version", why)
        for row in _unkept_versions(ctx, run)
        if is_free(ctx, run, row.version)
    ]
    old_samples = [*_old_samples(run, "samples"), *_old_samples(run, "evals")]
    return [*leftovers, *old_checkpoints, *old_versions, *old_samples]


def _kept_checkpoints(ctx: Context, run: RunRow) -> list[Checkpoint]:
    present = checkpoints(ctx.store, run.name)
    best = best_numbers(ctx, run)
    newest = present[-spec_of(run).checkpoint.keep :]
    return [row for row in present if row in newest or row.version in best]


def best_numbers(ctx: Context, run: RunRow) -> set[int]:
    """Find the versions that checkpoint.keep_best keeps."""
    kept = spec_of(run).checkpoint
    if not kept.keep_best:
        return set()
    _, evals = best_evals(ctx.store, run.name, kept.best_by)
    return {row.version for row in evals[: kept.keep_best]}


def key_of(checkpoint: Path) -> tuple[int, int] | None:
    """Read step and attempt of a checkpoint's directory from its name."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return (int(match[1]), int(match[2])) if match else None


def _unkept_versions(ctx: Context, run: RunRow) -> list[VersionRow]:
    """List the versions with files that `checkpoint` of the spec does not keep, and no checkpoint needs."""
    keep = spec_of(run).checkpoint.keep_versions
    if not keep:
        return []
    present = sorted(int(path.name) for path in listed(run.dir.versions) if VERSION.fullmatch(path.name))
    needed = _needed(ctx, run)
    unkept = []
    for number in present[:-keep]:
        if number not in needed:
            with contextlib.suppress(NotFound):  # it may not be ingested yet
                unkept.append(get_version(ctx.store, run.name, number))
    return unkept


def _needed(ctx: Context, run: RunRow) -> set[int | None]:
    """List the versions that the run itself needs: its current one, its checkpoints' and its best."""
    kept = {row.version for row in _kept_checkpoints(ctx, run)}
    return kept | {run.version} | best_numbers(ctx, run)


def may_go(ctx: Context, run: RunRow, number: int) -> bool:
    """Check that nothing needs a version, nor would an alias of its owner's roll back to it."""
    needed = _needed(ctx, run)
    return _may_be_pruned(run) and number not in needed and is_free(ctx, run, number, of=run.owner_uid)


def is_free(ctx: Context, run: RunRow, number: int, *, of: int | None = None) -> bool:
    """Check that a version is not pinned, aliased, loaded or in use, and that no alias would roll back to it.

    of: the user whose aliases alone may roll back; None: everybody's. A version without a row is not free: it
    may not be ingested yet.
    """
    if _has_silent_pool(ctx, run):
        return False
    try:
        row = get_version(ctx.store, run.name, number)
    except NotFound:
        return False
    if row.pinned or row.aliases or _is_in_use(ctx, row):
        return False
    back = [name for name, to in aliases.rollbacks(ctx.store).items() if to == (run.name, number)]
    return not any(of is None or aliases.get(ctx.store, name).owner_uid == of for name in back)


def _is_in_use(ctx: Context, version: VersionRow) -> bool:
    """Check whether an engine or a request has the version, which will let go of it soon."""
    return is_loaded(ctx, version) or version.name in ctx.serving.in_hand


def _old_samples(run: RunRow, of: Literal["samples", "evals"]) -> list[Doomed]:
    key = f"keep_{of}"
    keep: int = getattr(spec_of(run).checkpoint, key)
    old = sorted(listed(run.dir.root / of), key=age)[:-keep] if keep else []
    return [Doomed(run.name, path, "samples", f"checkpoint.{key} is {keep}") for path in old]


def age(samples: Path) -> tuple[int, int]:
    """Order files of samples by attempt, as resumes repeat steps, and step. Strange files are oldest."""
    match = _SAMPLES.fullmatch(samples.stem)
    return (int(match[2] or 0), int(match[1])) if match else (-1, -1)


def delete(ctx: Context, item: Doomed) -> Path | None:
    """Delete an item, so that nothing finds it, and return the path that is left to discard, if any. What its
    owner keeps from being deleted stays, and holds up nothing else.
    """
    log.info("deleting %s: %s", item.path, item.why)
    try:
        if item.kind in ("samples", "log"):
            item.path.unlink(missing_ok=True)
            return None
        if item.kind == "pool":
            ctx.pools.pop(item.path.name, None)
        if item.kind in ("leftover", "run", "life", "pool", "bundle"):
            return item.path
        if item.kind == "checkpoint" and (key := key_of(item.path)):
            mark_deleted(ctx.store, item.run, *key)
        # renamed before it is deleted, so that no reader sees half of it
        gone = item.path.with_name(f"{TEMPORARY}{item.path.name}-deleted-{time.time_ns()}")
        item.path.rename(gone)
        return gone
    except OSError as error:
        log.warning("%s cannot be deleted: %s", item.path, error.strerror)
        return None


def leftovers_in(directory: RunDir, *, before: float) -> list[Path]:
    """List the unfinished files of versions and checkpoints that nobody writes any more."""
    paths = [*listed(directory.versions), *listed(directory.checkpoints)]
    paths = [path for path in paths if path.name.startswith(TEMPORARY)]
    if not paths:
        return []
    since = min(before, time.time() - LEFTOVER_SECONDS) - lag_of(directory.root.parent)
    old = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < since:
                old.append(path)
    return old


def lag_of(directory: Path) -> float:
    """Measure by how many seconds the clock of a directory's file server is behind this machine's, so that a
    file that is being written does not look as if its writer had died; inf where nothing can be written.
    """
    probe = directory / f"{TEMPORARY}clock-{os.getpid()}"
    try:
        probe.touch(mode=0o600)
        lag = time.time() - probe.stat().st_mtime
        probe.unlink()
        return lag
    except OSError:
        return math.inf


def listed(parent: Path) -> list[Path]:
    """List what is in a directory in order, at most LISTED of it; [] where it cannot be read."""
    try:
        with os.scandir(parent) as entries:
            return [parent / name for name in sorted(entry.name for entry in islice(entries, LISTED))]
    except OSError:
        return []


def sizes_of(items: Iterable[Doomed]) -> dict[Path, int]:
    """Measure how many bytes each item takes. Runs in a thread."""
    return {item.path: bytes_of([item.path]) for item in items}
