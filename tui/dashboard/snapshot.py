"""The data of the dashboard: runs, pools, devices, the last events, and what needs attention.

It reads as little as possible: all runs once, then those with events. It does not use Textual.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lorad.alarms import MEASURED, Alarm, alarms, order
from lorad.box.config import AlarmLimits
from lorad.client.boxes.hosts import HERE
from lorad.client.client import Client
from lorad.client.columns import COLUMNS
from lorad.records.daemon import Status
from lorad.records.devices import Device
from lorad.records.pools import Pool
from lorad.records.runs import Event, Run
from lorad.selection import Selection
from lorad.tui.acknowledged import Acknowledged

_NAMES = 100  # that one request takes; when more runs changed, all are listed
_DAY = 24 * 3600.0  # how long a run that ended is among those that are listed without `all`
_LISTED = 300.0  # seconds after which all runs are listed again, whatever happened
_HISTORY = 500  # events to begin with
_EVENTS = 200  # that are kept
_ROUTINE = frozenset({"step", "version", "excused"})  # what a run that is well does all the time
HELD = 15.0  # seconds that an alarm of one step stays
_PER_STEP = frozenset(kind for _, _, kind, _ in MEASURED)
_PLACES = {"queued": 1, "paused": 2, "ended": 3}  # of states in the list; those that work come first
_PRICED = 30.0  # seconds between two looks at the bill
_PASSING = frozenset({"queued", "starting"})  # why they wait changes without an event


if TYPE_CHECKING:
    from lorad.tui.feed import Changes


@dataclass(frozen=True)
class Snapshot:
    """The state at one moment.

    Attributes:
        runs: The runs, newest first; the runs that ended come last.
        events: The events that are not routine, newest first.
        alarms: The alarms, worst first.
        costs: The costs by run, where a column shows them.
    """

    runs: tuple[Run, ...] = ()
    pools: tuple[Pool, ...] = ()
    devices: tuple[Device, ...] = ()
    events: tuple[Event, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)


class Board:
    """The data, kept up to date by one thread.

    Attributes:
        all: Runs that ended more than a day ago are listed, too.
        columns: The names of the columns that are shown, for which more is asked.
    """

    def __init__(
        self, limits: AlarmLimits, acknowledged: Acknowledged | None = None, box: str = HERE
    ) -> None:
        self.all = False
        self.columns: Sequence[str] = ()
        self._acknowledged = acknowledged or Acknowledged()
        self._box = box
        self._limits = limits
        self._runs: dict[str, Run] = {}
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._pools: list[Pool] = []
        self._devices: list[Device] = []
        self._status: Status | None = None
        self._raised: dict[tuple[str, str], tuple[float, Alarm]] = {}
        self._listed = 0.0  # when all runs were listed
        self._last = Snapshot()
        self._minute = 0
        self._costs: dict[str, float] = {}
        self._priced = float("-inf")

    def read(self, client: Client, changes: "Changes") -> Snapshot | None:
        """Return the current snapshot, or None when nothing in it changed."""
        everything = changes.everything
        keys = [name for name in self.columns if name not in COLUMNS]
        names = list(changes.kinds)  # of the runs to ask for
        if changes.tick:  # runs that change without an event, too
            passing = [name for name, run in self._runs.items() if run.state in _PASSING]
            others = [name for name in passing if name not in changes.kinds]
            names += others[: max(_NAMES - len(names), 0)]
        if everything or len(names) > _NAMES or time.monotonic() - self._listed > _LISTED:
            if keys:
                runs = client.select(Selection(), recent=not self.all, keys=keys)
            else:
                runs = client.list(all=self.all)
            self._runs = {run.name: self._same(run) for run in sorted(runs, key=lambda run: rank(run)[0])}
            self._listed = time.monotonic()
        elif names:
            runs = client.select(Selection(names=names), keys=keys) if keys else client.named(names)
            fresh = {
                run.name: self._same(run)
                for run in runs
                if self.all or run.state != "ended" or time.time() - (run.ended_at or time.time()) < _DAY
            }
            places = {name: rank(run) for name, run in self._runs.items() if name in fresh}
            for name in set(names) - set(fresh):  # a name that the daemon has no run for is gone
                self._runs.pop(name, None)
            self._runs |= fresh
            if any(places.get(name) != rank(run) for name, run in fresh.items()):
                self._runs = dict(sorted(self._runs.items(), key=lambda item: rank(item[1])))
        events = client.history(limit=_HISTORY) if everything else changes.events
        if everything:
            self._events.clear()
        last = self._events[-1].id if self._events else 0
        self._events.extend(event for event in events if event.id > last and event.kind not in _ROUTINE)
        if changes.tick:
            self._pools = client.pools()
            self._devices = client.devices()
            self._status = client.status()
            if "cost" in self.columns and (everything or time.monotonic() - self._priced > _PRICED):
                self._costs = {row.key: row.cost for row in client.bill().rows if row.cost is not None}
                self._priced = time.monotonic()
        return self._news(everything)

    # -- runs ------------------------------------------------------------------------------------------------
    def _same(self, run: Run) -> Run:
        """Return the known run if nothing in it changed, so that views can compare by identity."""
        before = self._runs.get(run.name)
        return before if before == run else run

    # -- the rest --------------------------------------------------------------------------------------------
    def _news(self, everything: bool) -> Snapshot | None:
        """Return the snapshot of now, or None when it is as before."""
        runs = self._acknowledged.alarming(self._runs.values(), self._box)
        raised = alarms(runs, self._limits, pools=self._pools, devices=self._devices, status=self._status)
        # A step's alarm stays a while even if the next step does not raise it: nobody can read what blinks
        now = time.monotonic()
        keyed = {(alarm.kind, alarm.subject): alarm for alarm in raised}
        self._raised |= {key: (now, alarm) for key, alarm in keyed.items() if alarm.kind in _PER_STEP}
        self._raised = {
            key: (at, alarm)
            for key, (at, alarm) in self._raised.items()
            if now - at < HELD and (run := self._runs.get(alarm.subject)) and run.state == "running"
        }
        lasting = [alarm for key, (_, alarm) in self._raised.items() if key not in keyed]
        if lasting:
            raised = sorted(raised + lasting, key=order)
        seen = Snapshot(
            tuple(self._runs.values()),
            tuple(self._pools),
            tuple(self._devices),
            tuple(reversed(self._events)),
            tuple(raised),
            dict(self._costs),
        )
        minute = int(time.time() // 60)  # ages
        if not everything and seen == self._last and minute == self._minute:
            return None
        self._last = seen
        self._minute = minute
        return seen


def rank(run: Run) -> tuple[int, float]:
    """Return the key by which runs are ordered: first runs that work, then runs that wait, then the ended."""
    return _PLACES.get(run.state, 0), -run.created_at


def rate(run: Run) -> float | None:
    """Return the tokens per second of a run; None unless it runs."""
    return run.rates.tokens_per_second if run.state == "running" else None
