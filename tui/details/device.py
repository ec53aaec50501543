"""A device as nvitop shows it: its last hour, and the processes on it with their users."""

import time

from msgspec import Struct
from rich.text import Text

from lorad.client.client import Client
from lorad.records.devices import Device
from lorad.records.pools import Pool
from lorad.text import one_line, size
from lorad.tui.actions.table import bindings
from lorad.tui.dashboard.one_liners import busy, holder, pool_of, used
from lorad.tui.details.screen import Chosen, DetailScreen, Drawn
from lorad.tui.widgets.columns import TableColumn, row_of

_HOUR = 3600.0
_EIGHTHS = " ▁▂▃▄▅▆▇█"


class _DeviceSeen(Struct, frozen=True):
    """A device at a moment, None where there is none of that name, and the pool that has it."""

    device: Device | None
    pool: Pool | None = None


class DeviceScreen(DetailScreen):
    NAME = "device"
    COLUMNS = (
        TableColumn("pid", 6, 9, 0, right=True, orders=True),
        TableColumn("user", 6, 16, 0, orders=True),
        TableColumn("memory", 8, 10, 1, right=True, orders=True),
        TableColumn("process", 8, 40, 2, orders=True),
        TableColumn("whose", 8, 80, 0, rest=True),
    )
    LACKS = "No pool of this daemon is on the device."
    BINDINGS = bindings("device")

    def fetch(self, client: Client, chosen: Chosen) -> _DeviceSeen:
        device = {device.device: device for device in client.devices(history=True)}.get(self.subject)
        pool = pool_of(device) if device else None
        return _DeviceSeen(device, next((each for each in client.pools() if each.pool == pool), None))

    def draw(self, fetched: _DeviceSeen | None, chosen: Chosen) -> Drawn:
        title = Text.assemble(("device ", "bold"), one_line(self.subject))
        if fetched is None:
            return Drawn(title)
        device = fetched.device
        if device is None:
            return Drawn(title, f"The machine has no {one_line(self.subject)}. esc goes back.")
        room = self.size
        height = 4 if room.height >= 40 else 2 if room.height >= 20 else 1
        facts = one_line(" · ".join(filter(None, (device.name, holder(device) or "free"))))
        above = Text(f"{facts}\n").append_text(hour(device, max(room.width - 2, 20), height, time.time()))
        pool = fetched.pool.pool if fetched.pool else ""
        lorads = f"lorad, pool {pool_of(device)}"
        lorads += f": {', '.join(fetched.pool.tenants)}" if fetched.pool and fetched.pool.tenants else ""
        rows = {
            str(process.pid): row_of(
                {
                    "pid": process.pid,
                    "user": (process.user or "unknown", process.user),
                    "memory": (size(process.memory), process.memory),
                    "process": (process.name or "unseen", process.name),
                    "whose": lorads if process.ours else "not lorad's",
                },
                "" if process.ours else "yellow",
            )
            for process in device.processes
        }
        opens = {str(process.pid): ("pool", pool) for process in device.processes if process.ours}
        return Drawn(title, above, "", rows, command="lorad devices", opens=opens, pool=pool)


def hour(device: Device, width: int, height: int, now: float) -> Text:
    """Draw what is measured of the last hour, each figure with its present value and its scale."""
    past = device.history
    power = [sample.power for sample in past if sample.power is not None]
    figures: list[tuple[str, str, list[float | None], float]] = [
        ("utilisation", busy(device), [sample.utilization for sample in past], 1.0),
        ("memory", used(device), [float(sample.memory) for sample in past], float(device.memory_total)),
    ]
    if device.power is not None:
        top = max([*power, device.power, 1.0])
        watts = [sample.power for sample in past]
        figures.append(("power", f"{device.power:.0f} W, at most {top:.0f}", watts, top))
    if device.temperature is not None:
        degrees = [sample.temperature for sample in past]
        figures.append(("temperature", f"{device.temperature} °C of 100", [*degrees], 100.0))
    parts = []
    for name, value, values, top in figures:
        parts.append(Text.assemble((f"{name} ", "bold"), value))
        if past:
            # as many parts of the hour as there are cells, each its mean or None
            cells: list[list[float]] = [[] for _ in range(width)]
            for sample, measured in zip(past, values, strict=True):
                place = int((sample.at - now + _HOUR) / _HOUR * width)
                if measured is not None and 0 <= place <= width:
                    cells[min(place, width - 1)].append(measured)
            means = [sum(cell) / len(cell) if cell else None for cell in cells]
            for row in reversed(range(height)):  # what was not measured is blank
                line = ""
                for mean in means:
                    share = min(max((mean or 0.0) / top if top else 0.0, 0.0), 1.0)
                    eighths = round(share * height * 8) - row * 8
                    line += " " if mean is None else _EIGHTHS[max(min(eighths, 8), 1 if row == 0 else 0)]
                parts.append(Text(line, style="green"))
    axis = f"{'1 hour ago':<{max(width - 3, 10)}}now" if past else "Nothing of the last hour was measured."
    parts.append(Text(axis, style="dim"))
    return Text("\n", no_wrap=True, overflow="crop").join(parts)
