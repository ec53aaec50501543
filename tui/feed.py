"""All data of the screens: one thread follows the event stream, another reads what changed.

The reader asks the screen in front what it needs (`_FedScreen.read`), never on the UI thread, and hands it
the result as a `Fresh` message; at most twice a second, and only when something happened. What has no events
(pools, devices) is asked for with every tick. When the daemon is lost, the app gets a `Line`, and the daemon
is asked again with a growing delay. Both threads are daemonic: leaving never waits for a socket.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from textual.message import Message
from textual.message_pump import MessagePump

from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, LoradError
from lorad.records.daemon import Status
from lorad.records.runs import Event

_PERIOD = 0.5  # seconds between two readings
TICK = 2.0  # seconds between two looks at what has no events
EVENTS = 200  # of one reading that are kept
_SILENCE = 15.0  # seconds without even an `idle` event: the daemon hangs
_SLOWEST = 4.0  # seconds, the longest wait before the next attempt to reach the daemon
PAUSE = 20  # after a slow question, times what it took


@dataclass
class Changes:
    """Collects what happened since the last reading.

    Attributes:
        everything: What happened is unknown, so all may have changed.
        tick: It is time to read what has no events.
        kinds: The kinds of events by run.
    """

    everything: bool = False
    tick: bool = False
    kinds: dict[str, set[str]] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS))

    def __bool__(self) -> bool:
        return self.everything or self.tick or bool(self.kinds)

    def touch(self, run: str, kind: str | None = None) -> bool:
        """Whether something (of that kind) happened to a run."""
        return self.everything or (run in self.kinds if kind is None else kind in self.kinds.get(run, ()))

    def take(self, event: Event) -> None:
        if event.run is None:
            self.everything = True
        else:
            self.kinds.setdefault(event.run, set()).add(event.kind)
        self.events.append(event)


@dataclass
class Fresh(Message):
    """Carries what `read` returned to a screen."""

    data: Any


@dataclass
class Failed(Message):
    """Informs a screen that its `read` was refused."""

    error: LoradError


@dataclass
class Line(Message):
    """Informs the app about the connection of a feed to the daemon.

    Attributes:
        lost: Why the connection is lost; "" when it is back.
        user: The user, who may only act on things of their own; None for one who may act on everything.
    """

    feed: "Feed"
    lost: str
    user: str | None = None


class _FedScreen(Protocol):
    """A screen, as the feed sees it."""

    def read(self, client: Client, changes: Changes) -> Any | None:
        """Return what to show, or None when nothing of it changed; called on the feed's thread."""

    def post_message(self, message: Message) -> bool: ...


class Feed:
    """Feeds a view that was opened with `Fresh` messages until another one is opened."""

    def __init__(self, client: Client, app: MessagePump) -> None:
        self._client = client
        self._app = app
        self._stream = client.patient(_SILENCE)
        self._view: _FedScreen | None = None
        self._changes = Changes()
        self._urgent = False
        self._ticked = 0.0
        self._missed = False  # something changed that could not be read
        self._frozen = False
        self._user: str | None = None
        self._news = threading.Condition()
        self._closed = threading.Event()

    def start(self) -> None:
        for work in (self._follow, self._serve):
            threading.Thread(target=work, name=f"feed{work.__name__}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with self._news:
            self._news.notify_all()

    def open(self, view: _FedScreen) -> None:
        """Read everything for this view now, and from then on what changes."""
        with self._news:
            self._view = view
        self.again()

    def again(self, *, urgent: bool = True) -> None:
        """Read everything again: all may have changed. urgent: also while it is frozen."""
        with self._news:
            self._changes.everything = True
            self._urgent |= urgent
            self._news.notify_all()

    def freeze(self, frozen: bool) -> None:
        """Keep what is shown as it is until it is thawed; then all that changed meanwhile is read."""
        with self._news:
            self._frozen = frozen
            self._news.notify_all()

    # -- the event stream ------------------------------------------------------------------------------------
    def _follow(self) -> None:
        cursor = -1
        delay = 0.0
        since = ""
        while not self._closed.wait(delay):
            try:
                self._user = restricted(self._stream.status())
                _post(self._app, Line(self, "", self._user))
                self.again(urgent=False)
                delay = 0.25
                since = ""
                cursor = self._events(cursor)
            except LoradError as error:
                since = since or time.strftime("%H:%M:%S")
                lost = f"No daemon since {since}, asking again; old figures. {error.message}"
                _post(self._app, Line(self, lost, self._user))
                delay = min(max(delay, 0.25) * 2, _SLOWEST)

    def _events(self, cursor: int) -> int:
        """Note events until the stream ends, and return the cursor to continue from.

        The first event may follow a gap, so it counts as if everything had changed.
        """
        first = cursor < 0
        for event in self._stream.events(cursor):
            if self._closed.is_set():
                break
            if first:
                self.again(urgent=False)
            elif event.kind != "idle":
                with self._news:
                    self._changes.take(event)
                    self._news.notify_all()
            cursor = event.id
            first = False
        return cursor

    # -- the reader ------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        while not self._closed.is_set():
            with self._news:
                self._news.wait_for(
                    lambda: (
                        self._closed.is_set()
                        or (self._changes and self._view and (self._urgent or not self._frozen))
                    ),
                    timeout=TICK,
                )
                view = self._view
                changes = self._taken()
            if view is not None and changes and not self._closed.is_set():
                self._read(view, changes)
            with self._news:
                self._news.wait_for(lambda: self._closed.is_set() or self._urgent, timeout=_PERIOD)

    def _taken(self) -> Changes:
        """Return the changes until now, which belong to the reader from here on."""
        if self._view is None or (self._frozen and not self._urgent):
            return Changes()
        changes = self._changes
        now = time.monotonic()
        if changes.everything or now - self._ticked >= TICK:
            changes.tick = True
            self._ticked = now
            changes.everything |= self._missed
            self._missed = False
        self._changes = Changes()
        self._urgent = False
        return changes

    def _read(self, view: _FedScreen, changes: Changes) -> None:
        try:
            data = view.read(self._client, changes)
            if data is not None:
                _post(view, Fresh(data))
        except DaemonUnreachable:  # the stream notices too
            self._missed = True
        except LoradError as error:
            self._missed = True
            _post(view, Failed(error))


def _post(to: _FedScreen | MessagePump, message: Message) -> None:
    """Post a message from a thread, which may outlive the interface."""
    with contextlib.suppress(RuntimeError):
        to.post_message(message)


def restricted(status: Status) -> str | None:
    """Return the user who may only act on things of their own; None for one who may act on everything."""
    return None if status.caller.admin else status.caller.user


@dataclass(eq=False)
class Pauses:
    """Makes a pause after each `asking` that is PAUSE times as long."""

    _free: float = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._free

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            self._free = now + PAUSE * (now - begun)
