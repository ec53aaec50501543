"""Keep a home within `disk_budget`, if config.yaml sets one: delete first what `lorad gc` deletes anyway,
then what ended runs can spare, which a warning tells them.

Runs can spare samples, and versions that are not current, loaded or in a checkpoint that counts, and that no
user named: by a pin, an alias, a fork, an export, a spec or an import.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from lorad.adapters.directory import discard
from lorad.daemon.context import Context
from lorad.daemon.state import bytes_of
from lorad.daemon.storage.garbage import all_doomed, still_doomed
from lorad.daemon.storage.prune import VERSION, Doomed, age, best_numbers, delete, is_free, listed, sizes_of
from lorad.states import EndReason, RunState
from lorad.store import events, runs
from lorad.store.checkpoints import checkpoints
from lorad.store.rows import RunRow
from lorad.store.versions import named_by_users
from lorad.text import size as in_words

log = logging.getLogger("lorad.daemon")

LOOK_SECONDS = 60.0
_AT_ONCE = 200  # runs that are looked at for what they can spare
GONE = "disk"  # the event of what went


def keep_budget(ctx: Context) -> None:
    """Look now and then; whatever has to go goes in a task of its own."""
    disk = ctx.storage.disk
    now = time.monotonic()
    if disk.is_measuring or ctx.config.disk_budget is None or now - disk.measured_at < LOOK_SECONDS:
        return
    disk.measured_at = now
    disk.is_measuring = True
    ctx.spawn(look(ctx, ctx.config.disk_budget))


async def look(ctx: Context, budget: int) -> None:
    disk = ctx.storage.disk
    try:
        disk.used = await asyncio.to_thread(bytes_of, [ctx.runs_root, ctx.home.root])
        if disk.used > budget:
            disk.used -= await _make_room(ctx, disk.used - budget)
        before = disk.warning
        disk.warning = ""
        if disk.used > budget:
            excess = f"{in_words(disk.used)} are used, disk_budget is {in_words(budget)}"
            disk.warning = f"{excess}; nothing more can go"
            if not before:
                log.warning("%s", disk.warning)
        elif before:
            log.info("the home is within its disk budget again")
    except OSError as error:
        log.warning("the disk cannot be measured: %s", error)
    finally:
        disk.is_measuring = False


async def _make_room(ctx: Context, excess: int) -> int:
    """Delete what can go until so many bytes are free, and return how many were freed. Runs are warned,
    except of what `lorad gc` would have deleted anyway.
    """
    freed = 0
    gone = defaultdict[str, list[tuple[Doomed, int]]](list)
    for group in (all_doomed(ctx), _spare(ctx)):
        candidates = []
        for number, item in enumerate(group):
            candidates.append(item)
            if number % 100 == 99:
                await asyncio.sleep(0)  # the event loop has its turn
        sizes = await asyncio.to_thread(sizes_of, candidates)
        for item in candidates:
            if freed >= excess:
                break
            if _is_still_free(ctx, item):
                path = delete(ctx, item)
                if path is not None:
                    await asyncio.to_thread(discard, path)
                freed += sizes[item.path]
                gone[item.run].append((item, sizes[item.path]))
    for run, items in gone.items():
        spared = [(item, size) for item, size in items if item.for_budget]
        if not spared or not runs.exists(ctx.store, run):
            continue
        counts = Counter("files of samples" if item.kind == "samples" else "versions" for item, _ in spared)
        counted = " and ".join(f"{count} {kind}" for kind, count in counts.items())
        total = sum(size for _, size in spared)
        message = f"the disk budget is used up: {counted} of {run} were deleted ({in_words(total)})"
        message += "; pins and aliases keep versions"
        with ctx.store.write():
            events.append(ctx.store, run, "warning", {"message": message})
            events.append(ctx.store, run, GONE, {"bytes": total, **counts})
    return freed


def _spare(ctx: Context) -> Iterator[Doomed]:
    """Yield all samples of ended runs but the newest file of each, then versions; the oldest end first."""
    names = runs.names_first_ended(ctx.store, _AT_ONCE)
    for name in names:
        run = runs.get(ctx.store, name)
        for directory in (run.dir.samples, run.dir.evals):
            for path in sorted(listed(directory), key=age)[:-1]:
                why = "disk_budget: the oldest samples of ended runs go first"
                yield Doomed(name, path, "samples", why, True)
    for run in (runs.get(ctx.store, name) for name in names):
        needed = {row.version for row in checkpoints(ctx.store, run.name)} | {run.version}
        needed |= best_numbers(ctx, run)
        named = named_by_users(ctx.store)
        for path in (path for path in listed(run.dir.versions) if VERSION.fullmatch(path.name)):
            if int(path.name) not in needed and _is_spare(ctx, run, path, named):
                why = "disk_budget: nothing refers to this version of an ended run"
                yield Doomed(run.name, path, "version", why, True)


def _is_spare(ctx: Context, run: RunRow, version: Path, named: set[str]) -> bool:
    """Check that nothing needs a version, and no user named it (`named_by_users`) or brought it."""
    number = int(version.name)
    is_named = run.reason == EndReason.IMPORTED or named & {f"{run.name}@{number}", str(version)}
    return not is_named and is_free(ctx, run, number)


def _is_still_free(ctx: Context, item: Doomed) -> bool:
    """Check that nothing has asked for the item while it was measured."""
    if item.kind not in ("version", "samples"):
        return bool(still_doomed(ctx, item.run, [item]))
    run = runs.find(ctx.store, item.run)
    if run is None or run.state != RunState.ENDED or not item.path.exists():
        return False
    return item.kind == "samples" or _is_spare(ctx, run, item.path, named_by_users(ctx.store))
