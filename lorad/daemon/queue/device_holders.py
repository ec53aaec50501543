"""Say who holds the devices and why: this daemon's pools, and those of other daemons, which leave notes.

A daemon that needs a GPU of another one's idle pool leaves a note; the other daemon then ends that pool after
`queue.idle_timeout_wanted`.
"""

import contextlib
import os
import time
from pathlib import Path

import psutil

from lorad.daemon.access import Reader, anybody
from lorad.daemon.context import Context
from lorad.daemon.gpu import lock_notes
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.lock_notes import Holder, WaitingNote
from lorad.daemon.guarded import each, of_pool
from lorad.daemon.pool import Pool
from lorad.daemon.pools.life import devices_of, timeout_of
from lorad.daemon.process.processes import read_status
from lorad.protocol.listener import user_name
from lorad.store import runs
from lorad.text import duration

_IDLE_JITTER = 5.0  # seconds


def keep_leases(ctx: Context) -> None:
    """Keep notes for other daemons: which GPUs this one holds, why, and which it waits for."""
    notes = ctx.gpus.notes
    current: dict[Path, Holder | WaitingNote] = {}

    def keep_lease(ctx: Context, pool: Pool) -> None:
        gpus = devices_of(ctx, pool) if pool.process.is_up else []
        if gpus and (holder := holder_of_pool(ctx, pool, anybody(ctx))).pid is not None:
            for device in gpus:
                current[lock_notes.note_path(ctx.home.root, device.uuid, "holder")] = holder

    each(ctx, keep_lease, list(ctx.pools.values()), of_pool)
    notes.since = {uuid: notes.since.get(uuid, time.time()) for uuid in notes.wanted}
    for uuid, why in notes.wanted.items():
        current[lock_notes.note_path(ctx.home.root, uuid, "wanted")] = WaitingNote(
            os.getuid(), why, notes.since[uuid]
        )
    notes.wanted = {}
    for device in (device for device in ctx.gpus.devices if device.uuid):
        for kind in ("holder", "wanted"):
            path = lock_notes.note_path(ctx.home.root, device.uuid, kind)
            if path in current:
                lock_notes.put(notes, path, current[path])
            else:
                lock_notes.remove(notes, path)


def holder_of_pool(ctx: Context, pool: Pool, reader: Reader) -> Holder:
    """Describe a pool as the holder of its devices; without its name where the reader may not see it."""
    status = read_status(pool.attempt()) or {}
    tenants = runs.active_in(ctx.store, pool.id)
    is_unused = pool.stop_asked is None and not (tenants or pool.serves or pool.guests)
    since = status.get("started_at") or ctx.loop.started_at
    if pool.stop_asked is not None:
        why = "is stopping"
    elif tenants:
        why = reader.name_all(tenants)
    elif pool.serves:
        why = reader.served_by(pool)
    else:
        why = "answers a request" if pool.guests else "idle"
    idle_since = time.time() - pool.idle_seconds
    before = ctx.gpus.notes.idle_since.get(pool.id, idle_since)
    if abs(idle_since - before) < _IDLE_JITTER:
        idle_since = before  # the same each time as long as nobody uses it
    if is_unused:
        ctx.gpus.notes.idle_since[pool.id] = idle_since
    return Holder(
        pool=pool.id if reader.sees(pool.setup.owner) else "",
        uid=pool.setup.owner,
        user=user_name(pool.setup.owner),
        why=why[:300],
        since=since,
        pid=status.get("pid"),
        start_time=status.get("start_time"),
        idle_timeout=None if pool.serves else timeout_of(ctx, pool),
        idle_since=max(since, idle_since) if is_unused else None,
    )


def held_in_words(device: Device, note: Holder | None) -> str:
    """Describe who locked a device that no pool of this daemon has, by the note that they left."""
    if note is None:
        holder = ""  # the process that has the lock, where it can be seen
        pid = lock_notes.lock_pid(device)
        with contextlib.suppress(psutil.Error):
            if pid:
                process = psutil.Process(pid)
                holder = f" ({process.name()}, pid {pid}, {process.username()})"
        return f"{device.name} is in use by another process or user{holder}"
    back = ""
    if (idle := note.idle_timeout) is not None:
        length = duration(idle).removesuffix("00s") if idle >= 60 else f"{idle:g}s"  # 600 -> 10m
        back = f", free after {length} idle"
    pool = f"pool {note.pool}" if note.pool else "a pool"
    return f"{device.name} held by {pool} ({note.user}, uid {note.uid}, {note.why}){back}"
