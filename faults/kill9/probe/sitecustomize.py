"""Loaded by every Python of a round (it is on their PYTHONPATH): writes phases, and springs the trap that is
set.

All lies in $KILL9_ROOT: `phases/<run>` holds "pid phase" of its driver; `starts` has a line for every driver
and pool that began; `trap.json` {role, point, after} makes the first process of that role that passes the
point for the `after`-th time kill itself, having renamed the trap to `sprung.json`; `migrations`: how many
there are beyond lorad's.
"""

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

ROOT = os.environ.get("KILL9_ROOT", "")
ROLES = {"lorad.daemon": "daemon", "lorad.driver": "driver", "lorad.pool": "pool"}
PHASES = {
    "sample": "sampling",
    "score": "scoring",
    "weigh": "scoring",
    "train": "training",
    "publish": "publish",
    "record": "recording",
    "evaluate": "evaluating",
}
RESTART_SECONDS = 0.2  # instead of lorad's pause before a restart: the rounds are to be over some day
passed: Counter[str] = Counter()
rename = os.rename


def role() -> str:
    argv = sys.orig_argv
    return ROLES.get(argv[argv.index("-m") + 1], "") if "-m" in argv[:-1] else ""


def at(point: str) -> None:
    """The process passes `point`."""
    path = os.path.join(ROOT, "trap.json")
    try:
        with open(path) as file:
            trap = json.load(file)
    except (OSError, ValueError):
        return
    if (trap["role"], trap["point"]) != (ROLE, point):
        return
    passed[trap["id"]] += 1
    if passed[trap["id"]] > trap["after"]:
        try:
            rename(path, os.path.join(ROOT, "sprung.json"))
        except OSError:
            return  # another process was first
        os.kill(os.getpid(), signal.SIGKILL)


def around(holder: Any, name: str, before: str = "", after: str = "") -> None:
    """Make a function pass points before and after its work."""
    inner: Callable[..., Any] = getattr(holder, name)

    def outer(*arguments: Any, **options: Any) -> Any:
        if before:
            at(before)
        result = inner(*arguments, **options)
        if after:
            at(after)
        return result

    setattr(holder, name, outer)


def watch_files() -> None:
    around(os, "rename", "rename", "renamed")
    around(os, "replace", "rename", "renamed")
    around(os, "fsync", "fsync", "fsynced")


def watch_daemon() -> None:
    import sqlite3

    from lorad.daemon.context import Patience
    from lorad.daemon.journal import DaemonJournal
    from lorad.daemon.process import processes
    from lorad.daemon.process.processes import Processes

    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(lambda sql: at("commit" if sql == "COMMIT" else "statement"))
        return connection

    sqlite3.connect = traced  # type: ignore[assignment]
    around(DaemonJournal, "write_ahead", "journal", "journaled")
    around(Processes, "start", "spawn", "spawned")
    names, defaults = list(Patience.__dataclass_fields__), list(Patience.__init__.__defaults__ or ())
    defaults[names.index("restart")] = RESTART_SECONDS
    Patience.__init__.__defaults__ = tuple(defaults)
    processes.SHIM[:] = [*processes.SHIM[:-1], os.path.join(os.path.dirname(__file__), "shim.py")]
    more_migrations()


def more_migrations() -> None:
    """Add the migrations of a later lorad."""
    from lorad.migrations import MIGRATIONS

    try:
        with open(os.path.join(ROOT, "migrations")) as file:
            count = int(file.read())
    except (OSError, ValueError):
        return
    for number in range(count):
        MIGRATIONS(name=f"m99{number:02d}_of_a_lorad_to_come")(migration(number))


def migration(number: int) -> Callable[[Any], None]:
    statements = (
        f"CREATE TABLE to_come_{number} (run TEXT REFERENCES runs (name) ON DELETE CASCADE, step INTEGER) "
        "STRICT",
        f"INSERT INTO to_come_{number} SELECT name, step FROM runs",
        f"ALTER TABLE runs ADD COLUMN to_come_{number} TEXT NOT NULL DEFAULT ''",
        f"UPDATE runs SET to_come_{number} = name",
    )

    def apply(database: Any) -> None:
        for statement in statements:
            at("migration")
            database.conn.execute(statement)
        at("migration")

    return apply


def watch_driver() -> None:
    from lorad.driver import checkpoint, driver
    from lorad.driver.attempt import main
    from lorad.protocol.journal import JournalWriter

    directory = sys.orig_argv[-1]
    run, number = directory.split("/")[-3], int(directory.split("/")[-1])
    fd = os.open(os.path.join(ROOT, "phases", run), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stopping: list[bool] = []

    def tell(phase: str) -> None:
        os.pwrite(fd, f"{os.getpid()} {'stopping' if stopping else phase}".ljust(63).encode() + b"\n", 0)

    def telling(holder: Any, name: str, phase: str) -> None:
        inner = getattr(holder, name)

        def outer(*arguments: Any, **options: Any) -> Any:
            tell(phase)
            return inner(*arguments, **options)

        setattr(holder, name, outer)

    def stop(flag: Any, *_: object) -> None:
        flag.wanted = True
        stopping.append(True)
        tell("stopping")

    tell("resume" if number > 1 else "starting")
    main.StopFlag.__call__ = stop  # type: ignore[method-assign, assignment]
    for verb, phase in PHASES.items():
        telling(driver, verb, phase)
    telling(checkpoint, "checkpoint", "checkpoint")
    append = JournalWriter.append

    def appending(writer: JournalWriter, kind: str, *arguments: Any) -> Any:
        at(f"journal {kind}")
        record = append(writer, kind, *arguments)
        at(f"journaled {kind}")
        return record

    JournalWriter.append = appending  # type: ignore[method-assign, assignment]


def attempt_directory() -> str:
    """Return the attempt's directory from the shim's environment, or from the log that it opened."""
    with contextlib.suppress(OSError):
        return os.environ.get("LORAD_ATTEMPT") or os.path.dirname(os.readlink("/proc/self/fd/1"))
    return ""


def begin() -> None:
    watch_files()
    if ROLE == "daemon":
        watch_daemon()
        return
    with open(os.path.join(ROOT, "starts"), "a") as file:
        file.write(f"{ROLE} {attempt_directory()} {os.getpid()}\n")
    if ROLE == "driver":
        watch_driver()


ROLE = role() if ROOT else ""
if ROLE:
    begin()
