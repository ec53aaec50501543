"""Read by byte offset what the processes of a run, the daemon and the gateways print."""

import asyncio
import codecs
import os
import re
from pathlib import Path

from lorad.bounds import LINE_CHARACTERS
from lorad.daemon.access import is_admin, must_be_admin
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.pool import Pool
from lorad.daemon.process.log_trim import cut_before
from lorad.daemon.services.gateway import GATEWAY
from lorad.daemon.services.service import OWN, process_of
from lorad.errors import NotFound, SpecError
from lorad.files import open_file
from lorad.records.runs import LogPart
from lorad.store import runs
from lorad.store.rows import RunRow

_PROCESSES = ("driver", "pool", "trainer", "engine")
_SERVER = re.compile(r"engine-\d{1,4}")  # one of several servers
_MOST = 1 << 20  # bytes in one answer


async def read_log(ctx: Context, call: Call) -> LogPart:
    """Read what the processes of a run print, or the driver of an earlier attempt did. Raises SpecError, and
    NotFound for an attempt that there never was.
    """
    run = runs.get(ctx.store, call.run)
    of = call.text("of") or "driver"
    attempt = call.number("attempt", 0)
    path = run.dir.attempt(attempt).log if attempt else log_of(ctx, run, of)
    if attempt and of != "driver":
        hint = f"A pool outlives attempts and keeps one log: `lorad logs {run.name} --of {of}` shows it."
        raise SpecError(f"there is no log of {of!r} by attempts", hint=hint)
    if attempt and attempt not in {row.attempt for row in runs.attempts(ctx.store, run.name)}:
        hint = f"`lorad show {run.name}` lists its attempts."
        raise NotFound(f"run {run.name} has no attempt {attempt}", hint=hint)
    return await asyncio.to_thread(read, path, call.number("offset", 0), call.number("limit", _MOST))


async def list_logs(ctx: Context, call: Call) -> list[str]:
    """List the logs that the driver, pool, trainer and servers of a run have now, each once."""
    run = runs.get(ctx.store, call.run)
    names = ["driver"]
    if pool := _pool_of(ctx, run):
        servers = await asyncio.to_thread(lambda: sorted(pool.attempt().work.glob("engine-*.log")))
        others = [path.stem for path in servers if _SERVER.fullmatch(path.stem)]
        names += ["pool", "trainer", *others]
    paths = {log_of(ctx, run, name): name for name in reversed(names)}
    return [name for name in names if name in paths.values()]


def log_of(ctx: Context, run: RunRow, of: str) -> Path:
    """Find a log of the newest attempt, or of the newest life of the run's pool.

    `engine` is the first server, `engine-1` the next; `trainer` holds all ranks. Parts without a process of
    their own write to the pool's log.
    """
    if of not in _PROCESSES and not _SERVER.fullmatch(of):
        raise SpecError(f"no log of {of!r}", hint=f"Choose one of: {', '.join(_PROCESSES)}, engine-1.")
    if of == "driver":
        return run.attempt_dir.log
    pool = _pool_of(ctx, run)
    if not pool:
        return Path(os.devnull)
    has_servers = pool.setup.server is not None and not pool.setup.server.urls
    if of.startswith("engine") and has_servers:
        return pool.attempt().work / f"{'engine-0' if of == 'engine' else of}.log"
    if of == "trainer" and pool.setup.has_ranks:
        return pool.attempt().work / "trainer.log"
    return pool.attempt().log


def _pool_of(ctx: Context, run: RunRow) -> Pool | None:
    """Find the pool of a run's newest attempt; None where another user's pool has its name by now."""
    pool = ctx.pools.get(run.pool or "")
    return pool if pool and ctx.users.is_believed(pool.setup.owner, run.owner_uid) else None


def read(path: Path, offset: int, limit: int) -> LogPart:
    """Read a part of a log, and cut no character in two.

    offset: counts what was cut from the log as well, or from the end where it is negative. Past the end it
        was of another log, and this one is read from its beginning.
    """
    try:
        with open_file(path, links=False) as file:
            cut = cut_before(file.fileno())
            size = file.seek(0, os.SEEK_END)
            start = size + offset if offset < 0 else offset - cut
            start = 0 if start > size else max(0, start)
            file.seek(start)
            data = file.read(max(0, min(limit, _MOST)))
    except OSError:  # none yet, or something that is no log
        return LogPart("")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lines = decoder.decode(data, final=start + len(data) >= size).split("\n")
    rest = len(decoder.getstate()[0])  # bytes of a character that the end cuts in two
    if rest == len(data):
        lines = [data.decode(errors="replace")]
        rest = 0
    for place, line in enumerate(lines):  # a program may print without ever ending its line
        if len(line) > LINE_CHARACTERS:
            lines[place] = f"{line[:LINE_CHARACTERS]}… ({len(line) - LINE_CHARACTERS} more)"
    return LogPart("\n".join(lines), cut + start + len(data) - rest, cut + size)


async def read_own_log(ctx: Context, call: Call) -> LogPart:
    """Read a part of the log of the caller's gateway or, for an admin, of the daemon. Raises SpecError."""
    of = call.text("of") or "daemon"
    if of == "daemon":
        must_be_admin(ctx, call.caller)
        path = ctx.home.daemon_log
    elif of == "gateway":
        lives = process_of(ctx, GATEWAY, OWN if is_admin(ctx, call.caller) else call.caller.uid).lives
        path = lives[-1].log if lives else Path(os.devnull)
    else:
        raise SpecError(f"no log of {of!r} without a run", hint="Choose daemon or gateway, or name a run.")
    return await asyncio.to_thread(read, path, call.number("offset", 0), call.number("limit", _MOST))
