"""What is known of the devices of this machine, and of the machine itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lorad.box.machine import Machine, read_machine
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.history import History
from lorad.daemon.gpu.lock_notes import Notes
from lorad.daemon.gpu.occupancy import Sights


def _recently(read: Callable[[], Machine], seconds: float = 1.0) -> Callable[[], Machine]:
    """The machine as it was read a moment ago: every run of a long queue asks for it."""
    seen: list[tuple[float, Machine]] = []

    def recent() -> Machine:
        if not seen or time.monotonic() - seen[0][0] > seconds:
            seen[:] = [(time.monotonic(), read())]
        return seen[0][1]

    return recent


@dataclass
class GpuState:
    """What `gpu/` remembers.

    notes: what stands beside the locks of GPUs.
    sights: who computes on GPUs.
    history: what was measured of the devices in the last hour.
    """

    devices: list[Device]
    notes: Notes = field(default_factory=Notes)
    sights: Sights = field(default_factory=Sights)
    history: History = field(default_factory=History)
    machine: Callable[[], Machine] = field(default_factory=lambda: _recently(read_machine))
