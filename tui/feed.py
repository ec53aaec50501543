"""Where all data of the screens comes from: one event stream, followed by one thread; another reads what changed.

The reader asks the screen in front what it needs (`View.read`), never on the UI thread, and hands it the result as a
`Fresh` message; at most twice a second, and only when something happened. A lost daemon is told to the app (`Line`),
then asked for again with a growing delay. Both threads are daemonic: leaving never waits for a socket.
"""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from textual.message import Message
from textual.message_pump import MessagePump

from lorad.client import Client
from lorad.errors import DaemonUnreachable, LoradError

PERIOD = 0.5  # seconds between two readings
SILENCE = 15.0  # seconds without even an `idle` event: the daemon hangs
SLOWEST = 4.0  # seconds, the longest wait before the next attempt to reach the daemon
BROKEN = (OSError, ValueError, http.client.HTTPException)  # a connection that ended in the middle of an answer


@dataclass
class Changes:
    """What happened since the last reading: kinds of events by run; `everything` when that is not known."""

    everything: bool = False
    kinds: dict[str, set[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.everything or bool(self.kinds)

    def touch(self, run: str, kind: str | None = None) -> bool:
        """Whether something (of that kind) happened to a run."""
        return self.everything or (run in self.kinds if kind is None else kind in self.kinds.get(run, ()))


class Fresh(Message):
    """To a screen: what its `read` returned."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data


class Failed(Message):
    """To a screen: its `read` was refused."""

    def __init__(self, error: LoradError) -> None:
        super().__init__()
        self.error = error


class Line(Message):
    """To the app: the daemon is lost, in words, or (`""`) there again."""

    def __init__(self, lost: str) -> None:
        super().__init__()
        self.lost = lost


class View(Protocol):
    """A screen, as the feed sees it."""

    def read(self, client: Client, changes: Changes) -> Any | None:
        """Called on the feed's thread: what to show, or None when nothing of it changed."""

    def post_message(self, message: Message) -> bool: ...


class Feed:
    """`open` a view and it gets `Fresh` messages until another one is opened."""

    def __init__(self, client: Client, app: MessagePump) -> None:
        self._client, self._app = client, app
        self._stream = client.patient(SILENCE)
        self._view: View | None = None
        self._changes, self._urgent = Changes(), False
        self._news = threading.Condition()
        self._closed = threading.Event()

    def start(self) -> None:
        for work in (self._follow, self._serve):
            threading.Thread(target=work, name=f"feed{work.__name__}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with self._news:
            self._news.notify_all()

    def open(self, view: View) -> None:
        """Read everything for this view now, and from then on what changes."""
        with self._news:
            self._view = view
        self._tell(None, urgent=True)

    def again(self) -> None:
        """Something else than an event calls for a new reading."""
        self._tell(None)

    def _tell(self, event: dict[str, Any] | None, *, urgent: bool = False) -> None:
        with self._news:
            if event is None or event["run"] is None:
                self._changes.everything = True
            else:
                self._changes.kinds.setdefault(event["run"], set()).add(event["kind"])
            self._urgent |= urgent
            self._news.notify_all()

    # -- the event stream --------------------------------------------------------------------------------------------
    def _follow(self) -> None:
        cursor, delay, since = -1, 0.0, ""
        while not self._closed.wait(delay):
            try:
                self._stream.status()
                self._app.post_message(Line(""))
                self._tell(None)
                delay, since = 0.25, ""
                cursor = self._events(cursor)
            except (LoradError, *BROKEN) as error:
                since = since or time.strftime("%H:%M:%S")
                told = error.message if isinstance(error, LoradError) else f"no daemon answers: {error}"
                self._app.post_message(Line(f"No daemon since {since}, asking again; old figures. {told}"))
                delay = min(max(delay, 0.25) * 2, SLOWEST)

    def _events(self, cursor: int) -> int:
        """Tell of events until the stream ends: the cursor to go on from. The first may follow a gap: all is new."""
        first = cursor < 0
        for event in self._stream.events(cursor):
            if self._closed.is_set():
                break
            self._tell(None if first else event)
            cursor, first = int(event["id"]), False
        return cursor

    # -- the reader ----------------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        while not self._closed.is_set():
            with self._news:
                self._news.wait_for(lambda: self._closed.is_set() or (self._changes and self._view))
                view, changes = self._view, self._changes
                self._changes, self._urgent = Changes(), False
            if view is not None and not self._closed.is_set():
                self._read(view, changes)
            with self._news:
                self._news.wait_for(lambda: self._closed.is_set() or self._urgent, timeout=PERIOD)

    def _read(self, view: View, changes: Changes) -> None:
        try:
            data = view.read(self._client, changes)
        except DaemonUnreachable:
            return  # the stream notices too, and everything is read when it is back
        except LoradError as error:
            view.post_message(Failed(error))
            return
        except BROKEN:
            return
        if data is not None:
            view.post_message(Fresh(data))
