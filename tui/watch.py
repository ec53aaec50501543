"""Asks this machine's daemon and those of all boxes of hosts.yaml, each in a thread of its own.

A box that does not answer keeps its thread and nobody else. It does not use Textual.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from lorad.alarms import Alarm, alarms
from lorad.box.config import Config, config_of
from lorad.box.paths import Home, default_home
from lorad.client.boxes.hosts import HERE, Place, far_home, limits_of, read_hosts
from lorad.client.client import Client
from lorad.client.words import set_aside
from lorad.errors import DaemonUnreachable, HostUnreachable, LoradError
from lorad.records.daemon import Status
from lorad.records.devices import Device
from lorad.records.runs import Run
from lorad.tui.acknowledged import Acknowledged

SECONDS = 5.0  # for a box to answer
LOCAL = "local"  # another name of this machine, for `:box`
_PERIOD = 4.0  # seconds between two looks at a box
_PAUSE = 4  # after a slow answer, times what it took
_UNSEEN = 10.0  # seconds without anybody who looks, after which no box is asked


@dataclass(frozen=True)
class BoxState:
    """The last answers of a box.

    Attributes:
        state: `reachable`, `asked`, `late`, `no daemon` or `unreachable`.
        says: Why it is not reachable, and what to do about it.
        runs: The runs as `Client.list` has them, while it is reachable; so are devices and alarms.
        user: Who may only act on their own runs there; None for one who may act on all.
    """

    name: str
    state: str = "asked"
    says: str = ""
    status: Status = field(default_factory=Status)
    runs: tuple[Run, ...] = ()
    devices: tuple[Device, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    user: str | None = None

    @property
    def free(self) -> int:
        """Count the devices that a run could have now."""
        return sum(not (row.pool or row.lease or set_aside(row)) for row in self.devices)

    @property
    def failed(self) -> int:
        """Count the runs that ended lately and not well."""
        good = (None, "completed", "stopped", "killed", "imported")
        return sum(run.state == "ended" and run.reason not in good for run in self.runs)


def client_of(name: str) -> Client:
    """Return a client of this machine's daemon (`here`), or of a box's. Raises SpecError for an unknown one.

    ssh asks nobody for a password: the terminal belongs to the screens.
    """
    return Client(Home(default_home()) if name in (HERE, LOCAL) else far_home(name, asks=False))


def settings_of(where: Place) -> Config:
    """Return the configuration by which this user sees a home: theirs of this machine, with its alarms.

    Raises SpecError for a config.yaml with a mistake.
    """
    own = config_of(where if isinstance(where, Home) else Home(default_home()))
    return msgspec.structs.replace(own, alarms=limits_of(where))


def names() -> list[str]:
    """Return what can be asked: `here` first, then the boxes of hosts.yaml. Raises SpecError."""
    return [HERE, *read_hosts().hosts]


def state_of(name: str, client: Client, acknowledged: Acknowledged) -> BoxState:
    """Ask a box. One that cannot be reached says why; nothing is raised."""
    try:
        status = client.status()
        runs = client.list()
        pools = client.pools()
        devices = client.devices()
        alarming = acknowledged.alarming(runs, name)
        raised = alarms(alarming, limits_of(client.where), pools=pools, devices=devices, status=status)
    except LoradError as error:
        is_up = isinstance(error, DaemonUnreachable) and not isinstance(error, HostUnreachable)
        return BoxState(name, "no daemon" if is_up else "unreachable", error.in_full)
    user = None if status.caller.admin else status.caller.user
    return BoxState(name, "reachable", "", status, (*runs,), (*devices,), (*raised,), user)


class BoxWatch:
    """Knows the state of all boxes, as long as somebody looks at them.

    tell: called when something changed, by any thread.
    acknowledged: whose alarms are left out.
    """

    def __init__(self, tell: Callable[[], None], acknowledged: Acknowledged) -> None:
        self._tell = tell
        self._acknowledged = acknowledged
        self._news = threading.Condition()
        self._states: dict[str, BoxState] = {}
        self._begun: dict[str, float] = {}  # when a box was asked that did not answer since
        self._threads: dict[str, threading.Thread] = {}
        self._looked = 0.0
        self._asked_again: set[str] = set()
        self._closed = False

    def look(self) -> tuple[BoxState, ...]:
        """Return what is known of every box. A box that owes an answer for too long is late.

        Raises SpecError for a hosts.yaml with a mistake.
        """
        boxes = names()
        with self._news:
            self._looked = now = time.monotonic()
            self._states = {name: self._states.get(name, BoxState(name)) for name in boxes}
            for name in set(boxes) - self._threads.keys():
                self._threads[name] = threading.Thread(target=self._keep, args=(name,), daemon=True)
                self._threads[name].start()
            self._news.notify_all()
            late = {name for name, begun in self._begun.items() if now - begun > SECONDS}
            return tuple(
                BoxState(name, "late", f"no answer in {SECONDS:.0f} s, still asking")
                if name in late
                else state
                for name, state in self._states.items()
            )

    def again(self) -> None:
        """Ask all boxes now that owe no answer."""
        with self._news:
            self._asked_again = set(self._states)
            self._news.notify_all()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _keep(self, name: str) -> None:
        """Ask one box again and again, while somebody looks and it is in hosts.yaml."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or time.monotonic() - self._looked < _UNSEEN)
                if self._closed or name not in self._states:
                    self._threads.pop(name, None)
                    return
                self._begun[name] = begun = time.monotonic()
                self._asked_again.discard(name)
            try:
                state = state_of(name, client_of(name).patient(2 * SECONDS), self._acknowledged)
            except LoradError as error:
                state = BoxState(name, "unreachable", error.in_full)
            with self._news:
                took = time.monotonic() - self._begun.pop(name, begun)
                is_news = name in self._states and self._states[name] != state
                if is_news:
                    self._states[name] = state
            if is_news or took > SECONDS:
                self._tell()
            with self._news:
                self._news.wait_for(
                    lambda: self._closed or name in self._asked_again, timeout=_PERIOD + _PAUSE * took
                )
