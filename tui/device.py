"""Shows a device as nvitop does: its last hour, and the processes on it with their users."""

import time
from collections.abc import Iterable, Sequence

from msgspec import Struct
from rich.text import Text
from textual.widget import Widget

from lorad.client.client import Client
from lorad.records.devices import Device, DeviceSample
from lorad.records.pools import Pool
from lorad.text import one_line, size
from lorad.tui import keys
from lorad.tui.dashboard.one_liners import busy, holder, used
from lorad.tui.dashboard.run_rows import cell
from lorad.tui.feed import Changes
from lorad.tui.screens.base import Base
from lorad.tui.widgets.columns import Column
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Cells, Rows

_HOUR = 3600.0
_COLUMNS = (
    Column("pid", 6, 9, 0, right=True, orders=True),
    Column("user", 6, 16, 0, orders=True),
    Column("memory", 8, 10, 1, right=True, orders=True),
    Column("process", 8, 40, 2, orders=True),
    Column("whose", 8, 80, 0, rest=True),
)
_EIGHTHS = " ▁▂▃▄▅▆▇█"


class _DeviceSeen(Struct, frozen=True):
    """A device at a moment. device: None where there is none of that name."""

    device: Device | None
    pool: Pool | None = None


class DeviceScreen(Base):
    BINDINGS = keys.DEVICE + keys.BACK
    DEFAULT_CSS = """
    DeviceScreen #device-facts { height: 1; width: 100%; padding: 0 1; text-wrap: nowrap; }
    DeviceScreen #device-hour { height: auto; width: 100%; padding: 0 1; text-wrap: nowrap; }
    DeviceScreen #processes { height: 1fr; min-height: 3; background: $background; }
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self._seen = _DeviceSeen(None)

    def body(self) -> Iterable[Widget]:
        yield Line(id="device-facts")
        yield Line(id="device-hour")
        yield Rows(_COLUMNS, id="processes")

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#processes", Rows).focus()

    # -- what is read and shown ------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes) -> _DeviceSeen:
        found = next((one for one in client.devices(history=True) if one.device == self.device), None)
        name = _pool_of(found) if found else None
        return _DeviceSeen(found, next((pool for pool in client.pools() if pool.pool == name), None))

    def show(self, data: _DeviceSeen) -> None:
        self._seen, device = data, data.device
        self.say_title(Text.assemble(("device ", "bold"), one_line(self.device)))
        facts = self.query_one("#device-facts", Line)
        if device is None:
            facts.say(f"The machine has no {one_line(self.device)}. esc goes back.")
            return
        held = holder(device) or "free"
        facts.say(one_line(" · ".join(filter(None, (device.name, held)))))
        self._draw()
        rows = {str(one.pid): _cells(data, number) for number, one in enumerate(device.processes)}
        values = {
            str(one.pid): {"pid": one.pid, "user": one.user, "memory": one.memory, "process": one.name}
            for one in device.processes
        }
        self.query_one("#processes", Rows).show(rows, values)
        self.offer("lorad devices")

    def _draw(self) -> None:
        if self._seen.device is not None:
            height = 4 if self.size.height >= 40 else 2 if self.size.height >= 20 else 1
            self.query_one("#device-hour", Line).say(
                hour(self._seen.device, max(self.size.width - 2, 20), height, time.time())
            )

    def on_resize(self) -> None:
        self._draw()

    def targets(self, on: str) -> list[str]:
        return []

    # -- keys ------------------------------------------------------------------------------------------------
    def action_pool(self) -> None:
        if self._seen.pool is not None:
            self.lorad.open_pool(self._seen.pool.pool)
        else:
            self.notify("No pool of this daemon is on the device.", markup=False)

    def on_rows_selected(self, event: Rows.Selected) -> None:
        """A process of lorad leads to its pool."""
        if self._is_ours(event.key):
            self.action_pool()

    def _is_ours(self, pid: str) -> bool:
        device = self._seen.device
        return device is not None and any(one.ours and str(one.pid) == pid for one in device.processes)

    def action_back(self) -> None:
        self.app.pop_screen()


def _pool_of(device: Device) -> str | None:
    return device.pool or (device.lease.pool if device.lease else None)


def _cells(seen: _DeviceSeen, number: int) -> Cells:
    device = seen.device
    assert device is not None
    one = device.processes[number]
    if one.ours:
        runs = ", ".join(seen.pool.tenants) if seen.pool else ""
        whose = f"lorad, pool {_pool_of(device)}" + (f": {runs}" if runs else "")
    else:
        whose = "not lorad's"
    row = {
        "pid": str(one.pid),
        "user": one.user or "unknown",
        "memory": size(one.memory),
        "process": one.name or "unseen",
        "whose": whose,
    }
    style = "" if one.ours else "yellow"
    return {key: cell(one_line(text), style) for key, text in row.items()}


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
        figures.append(
            ("power", f"{device.power:.0f} W, at most {top:.0f}", [one.power for one in past], top)
        )
    if device.temperature is not None:
        degrees = [sample.temperature for sample in past]
        figures.append(("temperature", f"{device.temperature} °C of 100", [*degrees], 100.0))
    parts = []
    for name, value, values, top in figures:
        parts.append(Text.assemble((f"{name} ", "bold"), value))
        lines = _bars(_spread(past, values, width, now), top, height)
        parts += [Text(line, style="green") for line in lines]
    parts.append(Text(f"{'1 hour ago':<{max(width - 3, 10)}}now", style="dim"))
    return Text("\n", no_wrap=True, overflow="crop").join(parts)


def _spread(
    past: Sequence[DeviceSample], values: Sequence[float | None], width: int, now: float
) -> list[float | None]:
    """Put the values into as many parts of the hour as there are cells, each its mean or None."""
    parts: list[list[float]] = [[] for _ in range(width)]
    for sample, value in zip(past, values, strict=True):
        place = int((sample.at - now + _HOUR) / _HOUR * width)
        if value is not None and 0 <= place <= width:
            parts[min(place, width - 1)].append(value)
    return [sum(part) / len(part) if part else None for part in parts]


def _bars(values: Sequence[float | None], top: float, height: int) -> list[str]:
    """Draw columns of `height` lines, from the top line to the lowest; what was not measured is blank."""
    lines = []
    for row in reversed(range(height)):
        line = ""
        for value in values:
            if value is None:
                line += " "
                continue
            eighths = round(min(max(value / top if top else 0.0, 0.0), 1.0) * height * 8) - row * 8
            line += _EIGHTHS[max(min(eighths, 8), 1 if row == 0 else 0)]
        lines.append(line)
    return lines
