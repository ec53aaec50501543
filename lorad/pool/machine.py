"""What the machine did during a step: its cores and memory, and the pool's devices.

All programs of the machine are in these figures: they say what a run had beside it, as much as what it used.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from lorad.pool.energy import Reading
from lorad.protocol.calls import MachineUse


@dataclass(frozen=True)
class _Until:
    """Sums until a moment.

    Attributes:
        cpu: The seconds that cores were busy.
        cpu_all: The seconds of all cores.
        samples: How often the devices were read.
    """

    at: float
    cpu: float
    cpu_all: float
    samples: int
    utilization: float
    power: float


def _memory_in_use() -> int:
    """Return the bytes of memory that all programs of the machine have."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


@dataclass
class MachineMeter:
    """What the machine did. Samples of the devices come from one thread, and steps from another one."""

    memory: Callable[[], int] = field(default=_memory_in_use)
    _last: Reading | None = None
    _sampled_at: float = 0.0
    _power: float | None = None
    _samples: int = 0
    _utilization: float = 0.0
    _watts: float = 0.0
    _began: dict[str, _Until] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sample(self, reading: Reading) -> None:
        """Note what the devices' counters say now, about each second."""
        with self._lock:
            now = time.monotonic()
            before = self._sampled_at
            self._power = reading.joules / (now - before) if before and reading.joules is not None else None
            self._last = reading
            self._sampled_at = now
            self._samples += 1
            self._utilization += reading.utilization or 0.0
            self._watts += self._power or 0.0

    def take(self, slot: str) -> MachineUse:
        """Return what happened since the last call for a slot, or since it was opened."""
        with self._lock:
            now = self._until()
            last = self._last
            before = self._began.pop(slot, now)
            self._began[slot] = now
            cores = now.cpu_all - before.cpu_all
            samples = now.samples - before.samples
            utilization = None if last is None else last.utilization
            power = self._power
            if samples and utilization is not None:
                utilization = (now.utilization - before.utilization) / samples
            if samples and power is not None:
                power = (now.power - before.power) / samples
        return MachineUse(
            seconds=now.at - before.at,
            cpu=(now.cpu - before.cpu) / cores if cores > 0 else None,
            memory=self.memory(),
            device_utilization=utilization,
            device_memory=(last.memory or None) if last is not None else None,
            device_power=power,
        )

    def opens(self, slot: str) -> None:
        """Begin to count for a slot."""
        with self._lock:
            self._began[slot] = self._until()

    def forget(self, slot: str) -> None:
        """Drop what a leaving run began."""
        with self._lock:
            self._began.pop(slot, None)

    def _until(self) -> _Until:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # are in user and nice, too
        every = sum(times) - guest
        return _Until(time.monotonic(), every - idle, every, self._samples, self._utilization, self._watts)
