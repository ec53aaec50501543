"""Start the daemon of a home where none answers; that of another box is started there."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from lorad.box.paths import Home, refuse_open
from lorad.client.boxes.hosts import HOST, Place
from lorad.client.client import Client
from lorad.client.systemd import start_by_unit
from lorad.client.transport import Transport
from lorad.errors import DaemonUnreachable, HostUnreachable, StorageError
from lorad.text import duration

_START_SECONDS = 20.0
_NOT_PASSED_ON = ("LORAD_ATTEMPT", HOST)  # a daemon is of no run, and of this machine


def connected(where: "Place | None" = None) -> Client:
    """Make a client of the home's daemon, which is started if need be.

    Raises DaemonUnreachable with the end of the daemon's log.
    """
    client = Client(where)
    try:
        client.status()
    except HostUnreachable:  # whether a daemon runs there is not known
        raise
    except DaemonUnreachable:
        start(client)
    return client


def start(client: Client, *, system: bool = False) -> None:
    """Start the daemon in the background and wait until it answers. If two do so at once, one of them wins.

    system: start it for all users, where no unit of systemd says so.
    """
    if not isinstance(client.where, Home):
        client.where.start_daemon()
        return
    home = client.where
    if (owner := home.shared_by) is not None:
        hint = f"User {owner} starts it: `lorad daemon run --system`, or `lorad daemon install --system`."
        raise DaemonUnreachable(
            f"no daemon answers in {home.root}, which is a shared one of user {owner}", hint=hint
        )
    try:
        home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        refuse_open(home.root)
        home.daemon_log.parent.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        hint = "Set LORAD_HOME to a directory that you may write; `lorad doctor` checks it."
        raise StorageError(f"{home.root} cannot be used as home: {error.strerror}", hint=hint) from None
    with contextlib.ExitStack() as stack:
        try:
            log: IO[bytes] = stack.enter_context(home.daemon_log.open("a+b"))
        except OSError:  # the daemon may still start, and say what is wrong
            log = stack.enter_context(tempfile.TemporaryFile())
        before = log.seek(0, os.SEEK_END)
        process = None if start_by_unit(home) else _spawn(home, log, system=system)
        if process is not None:  # whoever starts it may live long, and is to leave no zombie
            with contextlib.suppress(RuntimeError):  # no thread is left; the daemon says so better
                threading.Thread(target=process.wait, daemon=True, name="lorad daemon").start()
        if _await_answer(client, process):
            return
        log.seek(before)
        tail = log.read()[-2000:].decode(errors="replace").strip()
    raise DaemonUnreachable(f"the daemon did not start:\n{tail}", hint=f"Its log is {home.daemon_log}.")


def _await_answer(client: Client, process: subprocess.Popen[bytes] | None) -> bool:
    """Wait until a daemon answers. Returns False when it does not in time, or when `process` ends.

    `Transport.on_wait` hears how long it takes, every second.
    """
    begun = time.monotonic()
    second = 0
    try:
        while (waited := time.monotonic() - begun) < _START_SECONDS:
            if int(waited) > second and Transport.on_wait is not None:
                second = int(waited)
                Transport.on_wait(f"starting the daemon, {duration(second)}")
            try:
                pid = client.status().pid
            except DaemonUnreachable:
                if process is not None and process.poll() not in (None, 0):
                    return False
                time.sleep(0.02)
                continue
            if process is not None and pid != process.pid:  # another was quicker: ours ends when it sees it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_START_SECONDS)
            return True
    finally:
        if second and Transport.on_wait is not None:
            Transport.on_wait("")
    return False


def _spawn(home: Home, log: IO[bytes], *, system: bool = False) -> subprocess.Popen[bytes]:
    """Start the process of the daemon, in a session of its own. It prints to `log`."""
    return subprocess.Popen(
        [sys.executable, "-m", "lorad.daemon", *(["--system"] if system else [])],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        | {"LORAD_HOME": str(home.root)},  # it may be a run that starts it, and is outlived by it
    )
