"""The life of pools: find or make, start, look at, put away when idle, clear up after."""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import platform
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from lorad.bounds import STATUS_BYTES
from lorad.box.runtime import Decision, Overrides, choose_runtime
from lorad.children import leftovers
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import Device, lock_file
from lorad.daemon.gpu.lock_notes import LOOK_SECONDS, wanted_by_others
from lorad.daemon.guarded import each, of_pool
from lorad.daemon.pool import Pool, load_pool
from lorad.daemon.pools.as_owner import connection_to
from lorad.daemon.pools.grants import with_likely_first
from lorad.daemon.pools.threads import UNKNOWN
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.commands import own_secrets
from lorad.daemon.process.processes import DAMAGED, ProcessState, write_json
from lorad.daemon.process.user_files import make_attempt, make_pool
from lorad.daemon.troubles import Item
from lorad.errors import LoradError, StorageError
from lorad.protocol.calls import Evict, Nothing
from lorad.protocol.connection import Connection
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import PoolStatus
from lorad.states import ACTIVE
from lorad.store import pools as rows
from lorad.store import runs

log = logging.getLogger("lorad.daemon")
ANSWER_SECONDS = 2.0
_FRESH_SECONDS = 0.5
_KILLED_SECONDS = 5.0  # for a process to go after SIGKILL
LOCK_SECONDS = 30.0  # for servers of the life before to let go of its devices
_CLEAR_UP_SECONDS = 10.0  # that others wait for it, as what a user left behind may hang
_CHECK_SECONDS = 2.0  # between two looks at the files of a pool
_CLEAN_UP = (sys.executable, "-P", "-m", leftovers.__name__)
_POLL_SECONDS = {"starting": 0.25, "ready": 2.0, "stopping": 0.5}


def adopt_pools(ctx: Context) -> None:
    """Load every pool that has a directory, alive or not."""
    for root in sorted(ctx.home.pools.iterdir()) if ctx.home.pools.is_dir() else []:
        if pool := _load(ctx, root):
            ctx.pools[pool.id] = pool
        elif root.is_dir() and (root / "attempts").is_dir():
            ctx.pools.lost.append(root)
    for row in rows.list_pools(ctx.store):
        if row.pool not in ctx.pools:
            rows.remove(ctx.store, row.pool)


def find_lost_pools(ctx: Context) -> None:
    """Load the pools whose `pool.json` could not be read as soon as it can."""

    def find(ctx: Context, root: Path) -> None:
        if pool := _load(ctx, root):
            ctx.pools.setdefault(pool.id, pool)
        elif root.is_dir():
            doctor = "Should its process live, `lorad doctor --repair` does not end it: use `kill`."
            problem = f"{root / 'pool.json'} cannot be read, so the pool is left alone"
            raise StorageError(problem, hint=f"Put the file back. {doctor}")
        ctx.pools.lost.remove(root)

    each(ctx, find, list(ctx.pools.lost), lambda root: Item(f"pool {root.name}"))


def _load(ctx: Context, root: Path) -> Pool | None:
    """Load a pool. If its home was moved it gets a socket in the new home, unless it is up on the old one."""
    pool = load_pool(root)
    if pool is not None:
        socket = str(ctx.users.pool_socket(ctx.home, pool.id))
        if pool.setup.socket != socket and not Path(pool.setup.socket).exists():
            pool.setup = msgspec.structs.replace(pool.setup, socket=socket)
            write_json(root / "pool.json", msgspec.to_builtins(pool.setup))
    return pool


def find_or_make(ctx: Context, setup: PoolSetup) -> Pool:
    """Find the pool with this key: a warm one, else its directory from earlier, else a new one."""
    for pool in sorted(ctx.pools.values(), key=lambda pool: not pool.process.is_up):
        if pool.setup.key == setup.key and (pool.process.is_up or not _unusable(ctx, pool)):
            return pool
    last = setup.model.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    # `builtin:tiny` -> `tiny`, `/models/Qwen3-4B` -> `qwen3-4b`
    base = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:32] or "base"
    ids = (f"{base}-{number}" for number in itertools.count(1))
    pool_id = next(name for name in ids if name not in ctx.pools and not ctx.home.pool(name).exists())
    root = ctx.home.pool(pool_id)
    root.mkdir(parents=True, mode=0o700)
    named = msgspec.structs.replace(setup, pool=pool_id, socket=str(ctx.users.pool_socket(ctx.home, pool_id)))
    if named.nodes is not None:
        home = f"{platform.node()}:{ctx.home.root}".encode()  # others on the cluster may have the same path
        group = f"lorad/{ctx.home.root.name}-{hashlib.sha256(home).hexdigest()[:8]}/{pool_id}"
        named = msgspec.structs.replace(named, nodes=msgspec.structs.replace(named.nodes, group=group))
    write_json(root / "pool.json", msgspec.to_builtins(named))
    ctx.pools[pool_id] = Pool(named, root)
    return ctx.pools[pool_id]


def _unusable(ctx: Context, pool: Pool) -> str:
    """Find what in the pool's directory keeps a process from starting there; "" when nothing does."""
    for path, flags in (
        (pool.root / "pool.json", os.O_RDONLY),
        (pool.work / leftovers.LOCK, os.O_RDWR),
        (pool.root / "attempts", os.O_RDONLY | os.O_DIRECTORY),
    ):
        try:
            with as_user(ctx.user(pool.setup.owner) if path.parent == pool.work != pool.root else None):
                os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
            if path.is_dir() and not flags & os.O_DIRECTORY:
                return f"{path} is a directory, not a file"
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    if pool.setup.socket and Path(pool.setup.socket).is_dir():
        return f"{pool.setup.socket} is a directory, not a socket"
    return "" if load_pool(pool.root) else f"{pool.root / 'pool.json'} is damaged"


def start_pool(ctx: Context, pool: Pool, why: Decision = UNKNOWN) -> bool:
    """Start its process unless one is up; returns whether it was started.

    Its setup gets the idle timeout that config.yaml has now, and its nodes in the order in which they are
    tried.

    why: the reason for its number of threads.
    """
    look_at_process(ctx, pool)
    if pool.process.is_up:
        return False
    number = pool.number if pool.process.phase == "absent" and pool.number else pool.number + 1
    nodes = with_likely_first(ctx, pool)
    setup = msgspec.structs.replace(pool.setup, idle_timeout=_usual_timeout(ctx, pool), nodes=nodes)
    if setup != pool.setup:
        write_json(pool.root / "pool.json", msgspec.to_builtins(setup))
        pool.setup = setup
    overrides = Overrides(setup.threads, config=ctx.config.runtime, environment=os.environ)
    runtime = choose_runtime(0, ctx.gpus.machine(), setup.device, overrides)
    runtime = replace(runtime, reasons={**runtime.reasons, "threads": why})
    env = ctx.processes.commands.environment(ctx.home, runtime=runtime, pythonpath=setup.pythonpath)
    locks = [lock for device in ctx.gpus.devices if device.name in pool.names and (lock := lock_file(device))]
    user = ctx.user(setup.owner)
    make_pool(pool.root, msgspec.to_builtins(setup), user)
    make_attempt(pool.attempt(number), user)
    argv = [*ctx.processes.commands.pool, str(pool.work)]
    env |= own_secrets(user)
    about = {"role": "pool", "run": pool.id, "attempt": number, "runtime": runtime.told()}
    secrets = {name: str(path) for name, path in ctx.config.secrets.items()}
    about |= {"lock_seconds": LOCK_SECONDS, "secret_files": secrets}
    ctx.processes.start(pool.attempt(number), argv, env, pool.work, locks=locks, about=about, user=user)
    pool.process = ProcessState("starting")
    pool.used_at = time.monotonic()
    pool.status = None
    pool.stop_asked = None
    pool.grant = None
    log.info("pool %s: starting, life %d", pool.id, number)
    _note(ctx, pool)
    for name in pool.names:
        rows.lease(ctx.store, pool.id, name, "pool")
    return True


def look_at_process(ctx: Context, pool: Pool) -> None:
    """Read what became of its process."""
    if not pool.number:
        pool.process = ProcessState("absent")
        return
    attempt = pool.attempt()
    before = pool.process
    pool.process = ctx.processes.inspect(attempt)
    if pool.process.is_up:
        ctx.loop.watch(attempt.root, partial(ctx.processes.watch, attempt))
    if before.phase != pool.process.phase:
        _note(ctx, pool)
    if not pool.process.is_up:
        pool.status = None
        pool.stop_asked = None
        pool.grant = None
    if pool.process.is_over and not before.is_over:
        pool.clears_up_until = time.monotonic() + _CLEAR_UP_SECONDS
        ctx.spawn(_clear_up(ctx, pool))


def watch_pools(ctx: Context) -> None:
    """Look at the processes of all pools that may be up, and ask them how they are."""
    each(ctx, _watch_pool, list(ctx.pools.values()), of_pool)


def _watch_pool(ctx: Context, pool: Pool) -> None:
    """Look at a pool that may be up, and ask it how it is when that is due.

    Raises StorageError when the status of its process cannot be read, in which case the pool is judged by its
    lock, or something in its directory keeps a process from starting.
    """
    if pool.process.is_up or pool.process.trouble or (pool.process.phase == "absent" and pool.number):
        look_at_process(ctx, pool)
    is_due = time.monotonic() - pool.polled_at >= _POLL_SECONDS.get(pool.state, 0.0)
    if pool.process.phase == "alive" and is_due and not pool.asking.locked():
        ctx.spawn(ask_status(ctx, pool))
    if pool.process.trouble:
        raise StorageError(pool.process.trouble, hint=DAMAGED)
    if time.monotonic() - pool.checked[0] > _CHECK_SECONDS:
        pool.checked = time.monotonic(), _unusable(ctx, pool)
    if wrong := pool.checked[1]:
        raise StorageError(wrong, hint="New runs get a pool in another directory. Mend or remove that file.")


async def refresh(ctx: Context) -> None:
    """Ask pools that are up, unless they answered just now; ones that hang delay this only for a moment."""
    for pool in ctx.pools.values():
        look_at_process(ctx, pool)
    since = time.monotonic() - _FRESH_SECONDS
    old = [pool for pool in ctx.pools.values() if pool.process.phase == "alive" and pool.polled_at < since]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_SECONDS):
            await asyncio.gather(*(ask_status(ctx, pool) for pool in old if not pool.is_slow))


async def ask_status(ctx: Context, pool: Pool) -> None:
    """Ask the pool how it is. Calls that come while one is asked share the answer to the next question."""
    came = time.monotonic()
    async with pool.asking:
        if pool.asked_at >= came:
            return
        pool.asked_at = time.monotonic()
        opened: list[Connection] = []
        active = runs.in_states(ctx.store, *ACTIVE)
        at_work = {(run.name, run.attempt) for run in active} | {(name, 1) for name in ctx.requests.trials}
        tenants = pool.status.tenants if pool.status else []
        # so that the pool closes the slots of drivers that died without closing them
        evicted = [Evict(t.run, t.attempt) for t in tenants if (t.run, t.attempt) not in at_work]
        call = partial(_call_status, ctx, pool, evicted, opened)
        try:
            async with asyncio.timeout(3 * ANSWER_SECONDS):  # a user's pool may answer byte by byte
                status = await ctx.users.polls.do(pool.setup.owner, call)
            if pool.process.phase == "alive":
                first = pool.status is None
                pool.status = status
                if first:
                    _note(ctx, pool)
                    ctx.loop.poke()
        except (LoradError, OSError) as error:
            log.debug("pool %s does not answer: %s", pool.id, error)
        finally:
            for connection in opened:
                connection.abort()
            pool.polled_at = time.monotonic()
            pool.is_slow = pool.polled_at - pool.asked_at > ANSWER_SECONDS


def _call_status(ctx: Context, pool: Pool, evicted: list[Evict], opened: list[Connection]) -> PoolStatus:
    with connection_to(ctx, pool, ANSWER_SECONDS, STATUS_BYTES) as connection:
        opened.append(connection)
        for slot in evicted:
            connection.call("evict", slot)
        status: PoolStatus = connection.call("status", Nothing())
        return status


def timeout_of(ctx: Context, pool: Pool) -> float:
    """Choose how many seconds the pool stays warm when idle: few when another daemon waits for one of its
    devices or it has quiet hours, none when a user reserved one or a run that had it yields to somebody.
    """
    if pool.is_waiting:
        return 0.0  # it asks for nodes that no run needs any more
    aside = [ctx.gpus.set_aside[name] for name in pool.names if name in ctx.gpus.set_aside]
    if pool.id in ctx.gpus.in_the_way or any(reason.reserved for reason in aside):
        return 0.0
    uuids = {device.uuid for device in ctx.gpus.devices if device.uuid}
    if uuids and time.monotonic() - ctx.gpus.notes.looked_at > LOOK_SECONDS:
        ctx.gpus.notes.looked_at = time.monotonic()
        ctx.gpus.notes.others = wanted_by_others(ctx.home.root, uuids)
    is_awaited = any(device.uuid in ctx.gpus.notes.others for device in devices_of(ctx, pool))
    usual = _usual_timeout(ctx, pool)
    return min(usual, ctx.config.queue.idle_timeout_wanted) if is_awaited or aside else usual


def _usual_timeout(ctx: Context, pool: Pool) -> float:
    if pool.setup.nodes is None:
        return ctx.config.idle_timeout
    return ctx.config.cluster.idle_timeout if ctx.config.cluster else pool.setup.nodes.idle_timeout


def devices_of(ctx: Context, pool: Pool) -> list[Device]:
    """List the GPUs that a pool has."""
    return [device for device in ctx.gpus.devices if device.uuid and device.name in pool.names]


def put_away_pools(ctx: Context) -> None:
    """Stop pools that were idle for too long, and insist where a pool was asked to stop."""
    active = runs.in_states(ctx.store, *ACTIVE)
    busy = {pool.id for pool in ctx.pools.values() if pool.serves} | {run.pool for run in active}

    def put_away_pool(ctx: Context, pool: Pool) -> None:
        if pool.stop_asked is not None:
            _insist(ctx, pool, time.monotonic() - pool.stop_asked)
        elif pool.id in busy or pool.guests:
            pool.used_at = time.monotonic()
        elif pool.idle_seconds > timeout_of(ctx, pool):
            log.info("pool %s: idle for %.0f s", pool.id, pool.idle_seconds)
            stop_pool(ctx, pool)

    each(ctx, put_away_pool, [pool for pool in ctx.pools.values() if pool.process.is_up], of_pool)


def stop_pool(ctx: Context, pool: Pool) -> None:
    """Ask it to shut down; `put_away_pools` insists."""
    if pool.stop_asked is None:
        pool.stop_asked = time.monotonic()
        log.info("pool %s: stopping", pool.id)
        _note(ctx, pool)
        ctx.spawn(command(ctx, pool, "shutdown"))


async def end_pools(ctx: Context, pools: Sequence[Pool]) -> None:
    """Stop pools, and wait until they are gone or nothing more can be done about them."""
    for pool in pools:
        stop_pool(ctx, pool)
    deadline = time.monotonic() + ctx.patience.pool_term + _KILLED_SECONDS
    while time.monotonic() < deadline and (up := [pool for pool in pools if pool.process.is_up]):
        for pool in up:
            look_at_process(ctx, pool)
            if pool.stop_asked is not None:
                _insist(ctx, pool, time.monotonic() - pool.stop_asked)
        await asyncio.sleep(0.05)


async def command(ctx: Context, pool: Pool, verb: str) -> None:
    """Have a pool do a verb that takes it no time; one that does not answer is only logged."""

    def call() -> None:
        with connection_to(ctx, pool, ANSWER_SECONDS, STATUS_BYTES) as connection:
            connection.call(verb, Nothing())

    try:
        await ctx.users.polls.do(pool.setup.owner, call)
    except (LoradError, OSError) as error:
        log.debug("pool %s: %s: %s", pool.id, verb, error)


def _insist(ctx: Context, pool: Pool, seconds: float) -> None:
    attempt = pool.attempt()
    if seconds > ctx.patience.pool_term:
        ctx.processes.kill_group(attempt)
    elif (
        (pool.is_waiting or seconds > ctx.patience.pool_shutdown)  # until it has nodes, it hears no calls
        and ctx.processes.signalled.get(attempt.root, (0, 0.0))[0] != signal.SIGTERM
    ):
        ctx.processes.signalled[attempt.root] = (signal.SIGTERM, time.monotonic())
        ctx.processes.signal(attempt, signal.SIGTERM)


def _note(ctx: Context, pool: Pool) -> None:
    """Write the state of the pool to the database; a pool without a process has no row."""
    ctx.serving.served += 1
    if not pool.process.is_up:
        rows.remove(ctx.store, pool.id)
        return
    setup = pool.setup
    device = (*pool.holds, pool.where)[0]
    columns = {"state": pool.state, "model": setup.model, "mode": setup.mode, "device": device}
    rows.upsert(ctx.store, pool.id, **columns, pid=pool.process.pid, attempt=pool.number, key=setup.key)


async def _clear_up(ctx: Context, pool: Pool) -> None:
    """Remove what a killed pool leaves behind, with the rights of the pool's user: its files decide what."""
    user = ctx.user(pool.setup.owner)
    try:
        if user is None:
            await asyncio.to_thread(leftovers.clean_leftovers, pool.work)
            return
        argv = user.command([*_CLEAN_UP, str(pool.work)], pool.work)
        env = {**user.environment, **ctx.processes.commands.environment(ctx.home)}
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, env=env
        )
        await process.wait()
    except OSError as error:
        log.warning("pool %s: what it left was not cleared up: %s", pool.id, error)
    finally:
        pool.clears_up_until = 0.0
        ctx.loop.poke()
