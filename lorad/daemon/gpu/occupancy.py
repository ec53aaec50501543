"""Read from NVML who computes on a GPU: this daemon's pools, and other processes, next to which nothing is
placed.

It is read in a thread, as a driver in trouble answers late or never, and the daemon must not wait for it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lorad.box.gpus import nvml
from lorad.daemon.gpu.devices import Device
from lorad.text import one_line, size

log = logging.getLogger("lorad.daemon")

FRESH_SECONDS = 1.5  # older than that, it is read again before it counts
STALE_SECONDS = 10.0  # older than that, it says nothing
_DRAWN = 1 << 30  # bytes up to which a process that only draws, as a desktop, is no obstacle
# how much memory may be in use by processes that cannot be seen
_HIDDEN = 1 << 30  # bytes
_HIDDEN_SHARE = 50  # or one in so many parts of the memory


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU.

    user, name: "" when they cannot be read from here.
    memory: bytes; None when the driver does not report it.
    computes: False for a process that only draws.
    ours: it belongs to a pool of this daemon.
    lorads: it belongs to a run or pool of any daemon of lorad, perhaps another user's.
    """

    pid: int
    user: str
    name: str
    memory: int | None
    computes: bool
    ours: bool
    lorads: bool = False

    def in_words(self) -> str:
        taken = "" if self.memory is None else size(self.memory)
        about = ", ".join(part for part in (f"pid {self.pid}", self.user, taken) if part)
        return f"{self.name or 'a process that cannot be seen from here'} ({about})"


@dataclass(frozen=True)
class Sight:
    """What was seen of a GPU.

    at: the monotonic time of the look.
    utilization: from 0 to 1.
    held: a pool of this daemon had the device.
    lost: why the device cannot be used; "" when it can.
    power: watts.
    temperature: degrees Celsius.
    """

    at: float
    memory_used: int = 0
    utilization: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    held: bool = False
    lost: str = ""
    power: float | None = None
    temperature: int | None = None

    def strangers(self, device: Device) -> str:
        """Say who uses the device, so that nothing is placed there; "" when nobody does."""
        if self.lost:
            return f"{device.name} does not answer: {self.lost}"
        others = [process for process in self.processes if not process.ours]
        users = [process for process in others if process.computes or (process.memory or 0) > _DRAWN]
        if users:
            more = f" and {len(users) - 1} more" if len(users) > 1 else ""
            return f"{device.name} is in use by {users[0].in_words()}{more}"
        is_much = self.memory_used > max(_HIDDEN, device.memory_total // _HIDDEN_SHARE)
        if is_much and not self.held and not self.processes:
            used = size(self.memory_used)
            return f"{device.name} is in use by somebody who cannot be seen from here ({used})"
        return ""

    def foreign(self) -> list[GpuProcess]:
        """List the processes outside of lorad that compute there, or draw much."""
        others = [process for process in self.processes if not (process.ours or process.lorads)]
        return [process for process in others if process.computes or (process.memory or 0) > _DRAWN]


@dataclass
class Sights:
    """What was last seen on the GPUs.

    seen: the last sight of each GPU by UUID.
    since: the monotonic time at which the look in progress began; None while there is none.
    done: set when a look ends.
    """

    seen: dict[str, Sight] = field(default_factory=dict)
    since: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Ours:
    """What belongs to this daemon.

    pids: the processes of its pools and their shims.
    mark: how a variable in the environment of their children begins.
    devices: names of the devices that its pools hold.
    """

    pids: tuple[int, ...]
    mark: bytes
    devices: frozenset[str]


def read_all(gpus: Iterable[Device], ours: Ours) -> dict[str, Sight]:
    """Read all GPUs. Runs in a thread."""
    with nvml() as driver:
        if driver is None:
            return {device.uuid: Sight(time.monotonic()) for device in gpus}
        family: set[int] = set()
        for pid in ours.pids:
            with contextlib.suppress(psutil.Error):
                family |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        return {device.uuid: _read(driver, device, family, ours) for device in gpus}


def _read(driver: Any, device: Device, family: set[int], ours: Ours) -> Sight:
    """Read one GPU; leave out what the driver does not report to this user.

    In a container the driver may report pids of the host, which have no name here: on a device that a pool of
    this daemon holds they count as the pool's.
    """
    try:
        handle = driver.nvmlDeviceGetHandleByUUID(device.uuid)
        try:  # without the driver's own memory where it counts that separately
            used = int(driver.nvmlDeviceGetMemoryInfo(handle, version=driver.nvmlMemory_v2).used)
        except driver.NVMLError:
            used = int(driver.nvmlDeviceGetMemoryInfo(handle).used)
    except driver.NVMLError as error:
        return Sight(time.monotonic(), lost=str(error))
    computing = _listed(driver, driver.nvmlDeviceGetComputeRunningProcesses, handle)
    drawing = _listed(driver, driver.nvmlDeviceGetGraphicsRunningProcesses, handle)
    utilization = None
    with contextlib.suppress(driver.NVMLError):
        utilization = int(driver.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    power = temperature = None
    with contextlib.suppress(driver.NVMLError):
        power = int(driver.nvmlDeviceGetPowerUsage(handle)) / 1000
    with contextlib.suppress(driver.NVMLError):
        temperature = int(driver.nvmlDeviceGetTemperature(handle, driver.NVML_TEMPERATURE_GPU))
    is_held = device.name in ours.devices
    processes = []
    for pid, memory in sorted((drawing | computing).items()):
        try:
            process = psutil.Process(pid)
            name = one_line(process.name())
            user = one_line(process.username())
        except (psutil.Error, KeyError):
            name = user = ""
        attempt = b""  # the variable by which a daemon of lorad marks what it starts, and so their children
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            attempt = next((entry for entry in variables if entry.startswith(b"LORAD_ATTEMPT=")), b"")
        is_ours = pid in family or attempt.startswith(ours.mark) or (is_held and not name)
        processes.append(GpuProcess(pid, user, name, memory, pid in computing, is_ours, bool(attempt)))
    now = time.monotonic()
    return Sight(now, used, utilization, tuple(processes), is_held, "", power, temperature)


def _listed(driver: Any, call: Any, handle: Any) -> dict[int, int | None]:
    """Map the pids on a device to their bytes; empty where the driver reports none, as with MIG."""
    try:
        return {int(process.pid): process.usedGpuMemory for process in call(handle)}
    except (driver.NVMLError, driver.NVMLLibraryMismatchError):
        return {}
