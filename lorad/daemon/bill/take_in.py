"""Take in what pools wrote about who used them: see `USES` in lorad/protocol/status.py.

Reading a line again changes nothing, so how far a file was read is kept in memory alone. A life whose process
has ended is closed: what it had no time to report is nobody's.
"""

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path

import msgspec

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context
from lorad.daemon.guarded import each, of_pool
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import ANSWER_SECONDS, command
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.processes import attempts_under, read_status
from lorad.daemon.state import UsesFile
from lorad.errors import LoradError, StorageError
from lorad.files import log as logs
from lorad.files import open_file
from lorad.protocol.listener import user_name
from lorad.protocol.status import USES, Use, Uses, decode_uses
from lorad.store import bill
from lorad.store.bill import HOUR, Person

log = logging.getLogger("lorad.daemon")

_MOST_TOKENS = 1 << 36  # of a device within an hour: twenty million a second
_SILENCE = 120.0  # seconds that a pool may be behind with what it reports
_EVERY = 30.0  # seconds; whoever asks for the bill gets what was written up to now
_LARGEST = 256 << 20  # bytes of a file: pools keep theirs far below
_LINE = 16 << 20  # bytes of a line


def keep_bill(ctx: Context) -> None:
    """Take in what pools that have ended wrote, at once, and now and then what the others did."""
    is_due = time.monotonic() - ctx.bill.read_at > _EVERY
    if is_due:
        ctx.bill.read_at = time.monotonic()
    pools = [pool for pool in ctx.pools.values() if is_due or not pool.process.is_up]
    pools = [pool for pool in pools if {life.root for life in attempts_under(pool.root)} - ctx.bill.closed]
    try:
        with ctx.store.write(durable=False) if pools else contextlib.nullcontext():
            each(ctx, _take_in, pools, of_pool)
    except BaseException:
        ctx.bill.files.clear()
        ctx.bill.closed.clear()
        raise


async def take_in_all(ctx: Context) -> None:
    """Take in what all pools have to report up to now; one that hangs keeps nobody waiting for long."""
    up = [pool for pool in ctx.pools.values() if pool.process.phase == "alive" and not pool.is_slow]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_SECONDS):
            await asyncio.gather(*(command(ctx, pool, "write_uses") for pool in up))
    ctx.bill.read_at = float("-inf")
    keep_bill(ctx)


def _take_in(ctx: Context, pool: Pool) -> None:
    """Take in what the open lives of a pool wrote; users pay for what it was seen to hold in any case."""
    lives = [life for life in attempts_under(pool.root) if life.root not in ctx.bill.closed]
    for life in lives:
        try:
            _read(ctx, pool, life)
        except FileNotFoundError:
            pass
        except (OSError, LoradError) as error:  # another user's pool counts as if it had said nothing
            if not _is_strange(ctx, pool):
                raise
            log.debug("pool %s: %s", pool.id, error)
        began = (read_status(life) or {}).get("started_at") if _is_strange(ctx, pool) else None
        if began is not None:
            place = ctx.bill.files.setdefault(life.root, UsesFile())
            place.life = place.life or _name_of(life)
            if pool.names and not bill.is_closed(ctx.store, place.life):  # one on nodes may wait for them
                silent = Uses(place.life, pool.id, "", len(pool.names), began, began, [])
                until = _end_of(life) or time.time() - _SILENCE
                owner = Person(user_name(pool.setup.owner), pool.setup.owner)
                bill.keep_silence(ctx.store, silent, owner, until)
                ctx.bill.taken += 1
        if pool.process.is_over or life is not lives[-1]:
            ctx.bill.closed.add(life.root)
            place = ctx.bill.files.pop(life.root, UsesFile())
            if place.life and not bill.is_closed(ctx.store, place.life):
                bill.close(ctx.store, place.life, _end_of(life))


def _read(ctx: Context, pool: Pool, life: AttemptDir) -> None:
    """Take in the new reports of a life. Raises OSError, and StorageError, IntegrityError for a bad file."""
    place = ctx.bill.files.setdefault(life.root, UsesFile())
    with as_user(ctx.user(pool.setup.owner)):
        reports = _new_reports(life.work / USES, place)
    if not reports:
        return
    life_name = reports[0].life
    is_strange = _is_strange(ctx, pool)
    place.life = place.life or (_name_of(life) if is_strange else life_name)
    if bill.is_closed(ctx.store, place.life) or bill.is_closed(ctx.store, life_name):
        ctx.bill.closed.add(life.root)
        return
    newest: dict[int, Use] = {}
    for report in reports:
        newest |= {use.entry: use for use in report.uses if use.entry} if report.life == life_name else {}
    owner = Person(user_name(pool.setup.owner), pool.setup.owner)
    merged = msgspec.structs.replace(reports[-1], life=place.life, pool=pool.id, uses=[*newest.values()])
    if is_strange:  # corrected by what the daemon knows of the life itself, and without what cannot be
        began = (read_status(life) or {}).get("started_at") or merged.since
        devices = len(pool.names) or merged.devices
        uses = []  # as much as the devices can have done within an hour; for no run they make no tokens
        for use in (use for use in merged.uses if use.hour <= time.time()):
            tokens = max(use.generated, use.trained, use.served, use.prompts, use.cached)
            most = _MOST_TOKENS * devices if use.run else 0
            if tokens <= most and max(use.held, use.busy) <= 2 * HOUR * devices:
                uses.append(use)
        merged = msgspec.structs.replace(merged, since=began, devices=devices, uses=uses)
    try:
        bill.take_in(ctx.store, merged, owner, strange=is_strange)
    except BaseException:
        place.offset = 0
        raise
    ctx.bill.taken += 1


def _is_strange(ctx: Context, pool: Pool) -> bool:
    """Check whether a pool is another user's, who may have written anything into its file."""
    return ctx.users.shared and pool.setup.owner != os.getuid()


def _name_of(life: AttemptDir) -> str:
    began = (read_status(life) or {}).get("started_at") or 0.0
    return f"{life.root.parent.parent.name}/{life.root.name}/{began:.3f}"


def _new_reports(path: Path, place: UsesFile) -> list[Uses]:
    """Read the whole lines behind `place`, without damaged ones, and move it behind them."""
    form = logs.lines(decode_uses, "pass", most=_LINE, hint="Move it aside: that use is lost.")
    with open_file(path, links=False) as file:
        about = os.fstat(file.fileno())
        if about.st_size > _LARGEST:
            raise StorageError(f"{path} has {about.st_size} bytes", hint="Move it aside: no pool wrote that.")
        if about.st_ino != place.inode or about.st_size < place.offset:
            place.inode = about.st_ino
            place.offset = 0
        new = list(logs.read(file, path, form, place.offset))
    place.offset = new[-1][1] if new else place.offset
    return [report for report, _ in new]


def _end_of(life: AttemptDir) -> float | None:
    """Find the Unix time at which a life ended, by the clock of its beginning."""
    status = read_status(life) or {}
    began = status.get("started_at")
    lived = status.get("lived")
    return status.get("ended_at") if began is None or lived is None else began + lived
