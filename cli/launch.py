"""A client whose daemon answers: verbs that start work start the daemon when there is none."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import IO

from lorad.cli.systemd import start_by_unit
from lorad.client import Client
from lorad.errors import DaemonUnreachable, StorageError
from lorad.paths import Home

START_SECONDS = 20.0


def connected() -> Client:
    """A client of the home's daemon, started if need be. Raises DaemonUnreachable with the end of its log."""
    client = Client()
    try:
        client.status()
    except DaemonUnreachable:
        start(client)
    return client


def start(client: Client, *, system: bool = False) -> None:
    """Start the daemon in the background and wait until it answers. Two at once are fine: one of them wins.

    system: for all users, where no unit says so.
    """
    home = client.home
    if (owner := home.shared_by) is not None:
        hint = f"User {owner} starts it: `lorad daemon run --system`, or `lorad daemon install --system`."
        raise DaemonUnreachable(f"no daemon answers in {home.root}, which is a shared one of user {owner}", hint=hint)
    try:
        home.daemon_log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        home.daemon_log.touch()
    except OSError as error:
        hint = "Set LORAD_HOME to a directory that you may write; `lorad doctor` checks it."
        raise StorageError(f"{home.root} cannot be used as home: {error.strerror}", hint=hint) from None
    with home.daemon_log.open("ab") as log:
        before = log.tell()
        process = None if start_by_unit(home) else spawn(home, log, system=system)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            pid = client.status()["pid"]
            if process is not None and pid != process.pid:  # another one was quicker: ours ends when it sees that
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(START_SECONDS)
            return
        except DaemonUnreachable:
            if process is not None and process.poll() not in (None, 0):
                break
            time.sleep(0.02)
    tail = home.daemon_log.read_bytes()[before:][-2000:].decode(errors="replace").strip()
    raise DaemonUnreachable(f"the daemon did not start:\n{tail}", hint=f"Its log is {home.daemon_log}.")


def spawn(home: Home, log: IO[bytes], *, system: bool = False) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "lorad.daemon", *(["--system"] if system else [])],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "LORAD_ATTEMPT"}
        | {"LORAD_HOME": str(home.root)},  # it may be a run that starts it, and is outlived by it
    )
