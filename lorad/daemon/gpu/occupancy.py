"""Who computes on a GPU, as NVML tells it: this daemon's pools, and everybody else, next to whom nothing is placed.

It is read in a thread: a driver in trouble answers late or never, and the daemon must not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lorad.daemon.gpu.devices import Device, nvml
from lorad.daemon.process.processes import read_status
from lorad.text import one_line, size

if TYPE_CHECKING:
    from lorad.daemon.context import Context

log = logging.getLogger("lorad.daemon")

FRESH_SECONDS = 1.5  # older than that, it is read again before it counts
STALE_SECONDS = 10.0  # older than that, it says nothing
DRAWN = 1 << 30  # bytes up to which what only draws, a desktop, is no obstacle
HIDDEN, HIDDEN_SHARE = 1 << 30, 50  # memory in use by nobody who can be seen: bytes, and one in so many of the memory


@dataclass(frozen=True)
class Process:
    """On a GPU. user and name: "" when it cannot be seen from here; memory: bytes, None when that is not told."""

    pid: int
    user: str
    name: str
    memory: int | None
    computes: bool
    ours: bool

    def in_words(self) -> str:
        taken = "" if self.memory is None else size(self.memory)
        about = ", ".join(part for part in (f"pid {self.pid}", self.user, taken) if part)
        return f"{self.name or 'a process that cannot be seen from here'} ({about})"


@dataclass(frozen=True)
class Sight:
    """What was seen of a GPU. at: monotonic; utilization: 0 to 1; held: a pool of ours had it; lost: it is broken."""

    at: float
    memory_used: int = 0
    utilization: float | None = None
    processes: tuple[Process, ...] = ()
    held: bool = False
    lost: str = ""

    def strangers(self, device: Device) -> str:
        """Who makes the device one to stay away from, in words; "" when nobody does."""
        if self.lost:
            return f"{device.name} does not answer: {self.lost}"
        others = [process for process in self.processes if not process.ours]
        found = [process for process in others if process.computes or (process.memory or 0) > DRAWN]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"{device.name} is in use by {found[0].in_words()}{more}"
        is_much = self.memory_used > max(HIDDEN, device.memory_total // HIDDEN_SHARE)
        if is_much and not self.held and not self.processes:
            return f"{device.name} is in use by somebody who cannot be seen from here ({size(self.memory_used)})"
        return ""


@dataclass
class Sights:
    """By UUID. since: when the look began that is under way; done: none is."""

    seen: dict[str, Sight] = field(default_factory=dict)
    since: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Ours:
    """What belongs to this daemon. pids: of its pools and their shims; mark: in the environment of their processes;
    devices: names of those that its pools hold."""

    pids: tuple[int, ...]
    mark: bytes
    devices: frozenset[str]


def look(ctx: Context) -> None:
    """Begin to look at the GPUs, unless that was done just now or is under way."""
    gpus = [device for device in ctx.devices if device.uuid]
    oldest = min((ctx.sights.seen[d.uuid].at if d.uuid in ctx.sights.seen else 0.0 for d in gpus), default=None)
    if oldest is None or ctx.sights.since is not None or time.monotonic() - oldest < FRESH_SECONDS:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        ctx.sights.seen = read_all(gpus, ours(ctx))
        return
    ctx.sights.since = time.monotonic()
    ctx.sights.done.clear()
    ctx.spawn(observe(ctx, gpus))


async def observe(ctx: Context, gpus: list[Device]) -> None:
    try:
        ctx.sights.seen = await asyncio.to_thread(read_all, gpus, ours(ctx))
    except Exception as error:  # of bindings that do not fit the driver
        log.exception("NVML")
        ctx.sights.seen = {device.uuid: Sight(time.monotonic(), lost=repr(error)) for device in gpus}
    finally:
        ctx.sights.since = None
        ctx.sights.done.set()
        ctx.waker.poke()


async def fresh(ctx: Context, seconds: float = 2.0) -> None:
    """Look, and wait for it so long."""
    look(ctx)
    if ctx.sights.since is not None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ctx.sights.done.wait(), seconds)


def in_the_way(ctx: Context, device: Device) -> tuple[str, bool]:
    """Why nothing can be placed on a free device, in words, and whether that is known soon; "" when something can."""
    if not device.uuid:
        return "", False
    sight = ctx.sights.seen.get(device.uuid)
    if sight is None or time.monotonic() - sight.at > STALE_SECONDS:
        since = ctx.sights.since
        if since is not None and time.monotonic() - since > STALE_SECONDS:
            return f"{device.name}: NVIDIA's driver does not answer, so who uses it is not known", False
        return f"checking who uses {device.name}", True
    return sight.strangers(device), False


def ours(ctx: Context) -> Ours:
    up = [pool for pool in ctx.pools.values() if pool.process.is_up]
    statuses = [read_status(pool.attempt()) or {} for pool in up]
    pids = [status[key] for status in statuses for key in ("pid", "shim_pid") if status.get(key)]
    mark = b"LORAD_ATTEMPT=" + os.fsencode(ctx.home.pools) + b"/"
    return Ours(tuple(pids), mark, frozenset(name for pool in up for name in pool.setup.names))


def read_all(gpus: Iterable[Device], mine: Ours) -> dict[str, Sight]:
    """Runs in a thread."""
    with nvml() as found:
        if found is None:
            return {device.uuid: Sight(time.monotonic()) for device in gpus}
        family = family_of(mine.pids)
        return {device.uuid: read(found, device, family, mine) for device in gpus}


def read(found: Any, device: Device, family: set[int], mine: Ours) -> Sight:
    """One GPU; what the driver does not tell, or not to this user, is left out."""
    try:
        handle = found.nvmlDeviceGetHandleByUUID(device.uuid)
        used = memory_of(found, handle)
    except found.NVMLError as error:
        return Sight(time.monotonic(), lost=str(error))
    computing = listed(found, found.nvmlDeviceGetComputeRunningProcesses, handle)
    drawing = listed(found, found.nvmlDeviceGetGraphicsRunningProcesses, handle)
    utilization = None
    with contextlib.suppress(found.NVMLError):
        utilization = int(found.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    held = device.name in mine.devices
    processes = tuple(
        described(pid, memory, pid in computing, family, mine, held)
        for pid, memory in sorted((drawing | computing).items())
    )
    return Sight(time.monotonic(), used, utilization, processes, held)


def memory_of(found: Any, handle: Any) -> int:
    """Bytes in use; without those that the driver keeps for itself, where it can tell them apart."""
    try:
        return int(found.nvmlDeviceGetMemoryInfo(handle, version=found.nvmlMemory_v2).used)
    except found.NVMLError:
        return int(found.nvmlDeviceGetMemoryInfo(handle).used)


def listed(found: Any, call: Any, handle: Any) -> dict[int, int | None]:
    """pid -> bytes; empty where the driver does not say who is there (MIG, containers, old drivers)."""
    try:
        return {int(process.pid): process.usedGpuMemory for process in call(handle)}
    except (found.NVMLError, found.NVMLLibraryMismatchError):
        return {}


def family_of(pids: Iterable[int]) -> set[int]:
    """These and all that they started."""
    family: set[int] = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            family |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return family


def described(pid: int, memory: int | None, computes: bool, family: set[int], mine: Ours, held: bool) -> Process:
    """In a container the driver may tell pids of the host: on a device that a pool of ours holds, they are its own."""
    try:
        process = psutil.Process(pid)
        name, user = one_line(process.name()), one_line(process.username())
    except (psutil.Error, KeyError):
        name = user = ""
    is_ours = pid in family or is_marked(pid, mine.mark) or (held and not name)
    return Process(pid, user, name, memory, computes, is_ours)


def is_marked(pid: int, mark: bytes) -> bool:
    """It, or who started it, was started by this daemon as a part of a pool."""
    try:
        return any(entry.startswith(mark) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False
