"""What the pool's devices draw and do: NVML's figures of each GPU; of a CPU the counters of its packages
(RAPL).

Other processes are in these counters, too. Where neither can be read, nothing is known.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

_POWERCAP = Path("/sys/class/powercap")


class Reading(NamedTuple):
    """What the counters say.

    Attributes:
        joules: The energy since the last reading; None where it is unknown.
        memory: The bytes in use on the GPUs; 0 on a CPU.
        utilization: The share of the last moment in which a GPU computed, the mean of the GPUs.
    """

    joules: float | None
    memory: int = 0
    utilization: float | None = None


Meter = Callable[[], Reading]
"""Reads the counters. Called from one thread at a time."""


def meter_of(uuids: Sequence[str], powercap: Path = _POWERCAP) -> Meter | None:
    """Return what reads the counters of these GPUs, of the CPU where there are none; None: nothing does."""
    if not uuids:
        return _packages(powercap)
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    except pynvml.NVMLError as error:
        log.warning("energy and memory of %s are not known: %s", ", ".join(uuids), error)
        return None
    before: dict[int, int] = {}

    def read() -> Reading:
        memory = drawn = 0
        is_known = True
        busy: list[float] = []
        for place, handle in enumerate(handles):
            with contextlib.suppress(pynvml.NVMLError):
                memory += pynvml.nvmlDeviceGetMemoryInfo(handle).used
            with contextlib.suppress(pynvml.NVMLError):
                busy.append(int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100)
            now: int | None = None  # millijoules; GPUs before Volta do not count them
            with contextlib.suppress(pynvml.NVMLError):
                now = int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
            is_known = is_known and now is not None
            if now is not None:
                drawn += max(0, now - before.get(place, now))  # a driver that was loaded again begins at 0
                before[place] = now
        return Reading(drawn / 1000 if is_known else None, memory, sum(busy) / len(busy) if busy else None)

    read()
    return read


def _packages(powercap: Path) -> Meter | None:
    """Return what reads the counters of the CPU's packages, which are the domains without a parent. A counter
    begins again at its greatest value.
    """
    zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    try:
        ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        before = [int((zone / "energy_uj").read_text()) for zone in zones]
    except (OSError, ValueError):
        return None
    if not zones:
        return None

    def read() -> Reading:
        try:
            now = [int((zone / "energy_uj").read_text()) for zone in zones]
        except (OSError, ValueError):
            return Reading(None)
        grown = [(new - old) % (most + 1) for new, old, most in zip(now, before, ranges, strict=True)]
        before[:] = now
        return Reading(sum(grown) / 1e6)

    return read
