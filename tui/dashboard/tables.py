"""Pools, devices, events and alarms where there is room: a table each."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text

from lorad.alarms import Alarm
from lorad.records.devices import Device
from lorad.records.pools import Pool, PoolEngine, PoolTrainer
from lorad.records.runs import Event
from lorad.tui.dashboard import one_liners
from lorad.tui.dashboard.run_rows import LEVELS, bar
from lorad.tui.event_words import event_text
from lorad.tui.widgets.columns import Cells, Columns, TableColumn, row_of
from lorad.tui.widgets.table import Rows


class Pane(Rows):
    """A table beside others, with a title; it knows which run and which pool each row is about."""

    TITLE: ClassVar[str] = ""
    COLUMNS: ClassVar[Columns] = ()
    runs: Mapping[str, str | None] = {}
    pools: Mapping[str, str | None] = {}
    DEFAULT_CSS = """
    Pane { height: auto; min-height: 4; max-height: 20vh; border: round $primary; background: $background; }
    Pane:focus { border: round $accent; }
    """

    def __init__(self) -> None:
        super().__init__(self.COLUMNS, id=self.TITLE)
        self.border_title = self.TITLE

    def show_from_top(self, rows: dict[str, Cells]) -> None:
        """Show the rows from the first one, unless the table has the focus."""
        self.show(rows)
        if not self.has_focus:
            self.turn(0, 0)


class PoolsPane(Pane):
    TITLE = "pools"
    COLUMNS = (
        TableColumn("pool", 6, 24, 0, orders=True, shrinks=12),
        TableColumn("base", 6, 24, 4, orders=True),
        TableColumn("runs", 4, 5, 1, right=True, orders=True),
        TableColumn("slots", 5, 7, 3, right=True),
        TableColumn("sampled", 7, 9, 0, right=True, orders=True),
        TableColumn("trained", 7, 9, 2, right=True, orders=True),
        TableColumn("phase", 6, 28, 0),
        TableColumn("engine", 7, 12, 5),
        TableColumn("trainer", 7, 12, 6),
    )

    def fill(self, pools: Sequence[Pool]) -> None:
        self.pools = {pool.pool: pool.pool for pool in pools}
        rows = {}
        for pool in pools:
            base = one_liners.base(pool.model)
            sampled = pool.engine_tokens_per_second
            trained = pool.trainer_tokens_per_second
            is_up = pool.state == "ready" or pool.runs
            rows[pool.pool] = row_of(
                {
                    "pool": pool.pool,
                    "base": (base + (f" on {', '.join(pool.nodes)}" if pool.nodes else ""), base),
                    "runs": len(pool.tenants),
                    "slots": one_liners.slots(pool),
                    "sampled": (one_liners.speed(sampled), sampled),
                    "trained": (one_liners.speed(trained), trained),
                    "phase": one_liners.phase(pool) if is_up else pool.waiting or pool.state,
                    "engine": _part(pool.engine),
                    "trainer": _part(pool.trainer),
                }
            )
        self.show_rows(rows)


class DevicesPane(Pane):
    TITLE = "devices"
    COLUMNS = (
        TableColumn("device", 6, 12, 0, orders=True),
        TableColumn("memory", 12, 28, 2, orders=True),
        TableColumn("busy", 4, 5, 1, right=True, orders=True),
        TableColumn("lease", 8, 40, 0, shrinks=21),
        TableColumn("others", 8, 60, 3, rest=True),
    )

    def fill(self, devices: Sequence[Device]) -> None:
        self.pools = {device.device: one_liners.pool_of(device) for device in devices}
        rows = {}
        for device in devices:
            memory = device.memory_used / device.memory_total if device.memory_total else 0.0
            rows[device.device] = row_of(
                {
                    "device": device.device,
                    "memory": (f"{bar(memory, 6)} {one_liners.used(device)}", memory),
                    "busy": (one_liners.busy(device), device.utilization),
                    "lease": one_liners.holder(device),
                    "others": one_liners.others(device),
                }
            )
        self.show_rows(rows)


class Ticker(Pane):
    TITLE = "events"
    COLUMNS = (
        TableColumn("at", 9, 9, 1),
        TableColumn("run", 6, 28, 0, shrinks=12),
        TableColumn("what", 10, 200, 0, rest=True),
    )

    def fill(self, events: Sequence[Event]) -> None:
        self.runs = {str(event.id): event.run for event in events}
        rows = {}
        for event in events:
            facts = {"at": one_liners.clock(event), "run": event.run or "", "what": event_text(event)}
            rows[str(event.id)] = self._cells.get(str(event.id)) or row_of(facts).cells
        self.show_from_top(rows)


class Alarms(Pane):
    TITLE = "alarms"
    COLUMNS = (
        TableColumn("!", 3, 3, 0),
        TableColumn("about", 6, 28, 0, shrinks=12),
        TableColumn("alarm", 6, 14, 1),
        TableColumn("what", 10, 200, 0, rest=True),
    )

    def fill(self, alarms: Sequence[Alarm]) -> None:
        keyed = {f"{alarm.kind} {alarm.subject or alarm.says}": alarm for alarm in alarms}
        self.runs = {key: alarm.subject for key, alarm in keyed.items() if alarm.on == "run"}
        if (title := one_liners.counted(len(alarms), "alarm")) != self.border_title:
            self.border_title = title
        rows = {}
        for key, alarm in keyed.items():
            facts = {"about": alarm.subject or alarm.on, "alarm": alarm.kind, "what": alarm.says}
            rows[key] = {"!": Text(*LEVELS[alarm.level]), **row_of(facts).cells}
        self.show_from_top(rows)


def _part(about: PoolEngine | PoolTrainer) -> str:
    """Name an engine or trainer, and what is wrong with it."""
    asleep = isinstance(about, PoolEngine) and about.asleep
    gone = " GONE" if about.alive is False else " asleep" if asleep else ""
    return f"{about.name}{gone}"
