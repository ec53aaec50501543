"""Notes beside the locks of GPUs: the daemons of all users read there who holds a GPU and who waits for it.

The files `<uuid>.holder-<uid>-<home>.json` and `<uuid>.wanted-<uid>-<home>.json` lie in the directory of the
locks; <home> distinguishes the daemons of one user. A note only affects messages and when an idle pool ends:
the lock alone decides who has a GPU. A note is believed only where its file belongs to the user in its name,
and shown printable.
"""

import contextlib
import hashlib
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from lorad.box import gpu_locks
from lorad.children.identity import stat_of
from lorad.daemon.gpu import devices
from lorad.daemon.gpu.devices import Device, is_taken, lock_file
from lorad.files import write_whole
from lorad.text import one_line

_NOTE_BYTES = 8192
_MOST_ENTRIES = 4096  # entries read: everybody may write in the directory
FRESH_SECONDS = 30.0  # a daemon that waits says so again in a third of it
_SKEW_SECONDS = 5.0
LOOK_SECONDS = 2.0  # between two looks at what others want
_Text = Annotated[str, Meta(max_length=400)]
_Seconds = Annotated[float, Meta(ge=0, le=1e11)]
T = TypeVar("T", bound="Struct")


class Holder(Struct, frozen=True):
    """Who holds a device.

    uid, user: the owner of the pool.
    why: what the pool does.
    since: Unix time.
    pid, start_time: the pool's process.
    idle_timeout: seconds that the pool stays up when idle; None: until it is asked to stop.
    idle_since: Unix time.
    """

    pool: _Text
    uid: int
    user: _Text
    why: _Text
    since: _Seconds
    pid: int | None = None
    start_time: int | None = None
    idle_timeout: _Seconds | None = None
    idle_since: _Seconds | None = None


class WaitingNote(Struct, frozen=True):
    """A daemon waits for a device.

    why: what it waits for the device for.
    """

    uid: int
    why: _Text
    since: _Seconds


@dataclass
class Notes:
    """The notes that this daemon wrote, and what it read in those of others. Times are monotonic unless
    noted.

    written: path -> the note's bytes, and when they were written.
    wanted: UUID -> what for, in this pass of the loop.
    since: UUID -> Unix time since when it is wanted.
    idle_since: pool -> Unix time since when it is idle.
    others: UUIDs that other daemons wait for.
    """

    written: dict[Path, tuple[bytes, float]] = field(default_factory=dict)
    wanted: dict[str, str] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    idle_since: dict[str, float] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    looked_at: float = float("-inf")


def note_path(home: Path, uuid: str, kind: str) -> Path:
    """Name the file in which the daemon of `home` keeps its note of this kind."""
    return devices.LOCKS / f"{uuid}.{kind}-{os.getuid()}-{_home_name(home)}.json"


def _home_name(home: Path) -> str:
    return hashlib.sha256(os.fsencode(home)).hexdigest()[:8]


def write_note(path: Path, data: bytes) -> None:
    """Write a note that everybody can read.

    Raises OSError, also when the file there belongs to another user.
    """
    gpu_locks.make_directory(devices.LOCKS)
    write_whole(path, data, mode=0o644, durable=False)


def _notes_of(uuid: str, kind: str) -> Iterator[tuple[int, str, Path]]:
    """Yield all notes of that kind about a device: uid and home in the name of the file, and its path."""
    pattern = re.compile(re.escape(f"{uuid}.{kind}-") + r"(\d{1,10})-([0-9a-f]{8})\.json")
    with contextlib.suppress(OSError), os.scandir(devices.LOCKS) as entries:
        for entry in itertools.islice(entries, _MOST_ENTRIES):
            if match := pattern.fullmatch(entry.name):
                yield int(match[1]), match[2], Path(entry.path)


def _read_note(path: Path, uid: int, kind: type[T]) -> tuple[T, float] | None:
    """Read a note and when it was written; None unless it is a small, readable file of that user's."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid or status.st_size > _NOTE_BYTES:
            return None
        return msgspec.json.decode(os.read(file, _NOTE_BYTES), type=kind), status.st_mtime
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    finally:
        os.close(file)


def holder_of(device: Device) -> Holder | None:
    """Read who holds the device from its holder's note; None when the device is free or has no such note."""
    if not device.uuid or not is_taken(device):
        return None
    believed = None
    pid = lock_pid(device)
    with contextlib.suppress(OSError):  # there may be no such process
        believed = {0, os.stat(f"/proc/{pid}").st_uid}
    notes: list[tuple[bool, float, Holder]] = []
    for uid, _, path in _notes_of(device.uuid, "holder"):
        note = _read_note(path, uid, Holder) if believed is None or uid in believed else None
        if note is not None and (uid == 0 or note[0].uid == uid):
            process = stat_of(note[0].pid or 0)  # or a zombie of it
            is_there = process is not None and process.start == note[0].start_time
            notes.append((is_there, note[1], note[0]))
    if not notes:
        return None
    *_, holder = max(notes, key=lambda note: note[:2])
    return msgspec.structs.replace(
        holder,
        pool=one_line(holder.pool)[:80],
        user=one_line(holder.user)[:32],
        why=one_line(holder.why)[:160],
    )


def lock_pid(device: Device) -> int | None:
    """Find the process that locked the device; None when the kernel does not list it.

    A child of that process may hold the lock by now.
    """
    path = lock_file(device)
    try:
        inode = str(path.stat().st_ino) if path else ""
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for fields in (line.split() for line in lines):
        if fields[1:2] == ["FLOCK"] and len(fields) > 5 and fields[5].rpartition(":")[2] == inode:
            return int(fields[4]) if int(fields[4]) > 0 else None
    return None


def wanted_by_others(home: Path, uuids: set[str]) -> frozenset[str]:
    """Find the devices that daemons of other homes wait for, by notes that are still fresh."""
    now = time.time()
    awaited: set[str] = set()
    for uuid in uuids:
        for uid, name, path in _notes_of(uuid, "wanted"):
            note = (
                None if (uid, name) == (os.getuid(), _home_name(home)) else _read_note(path, uid, WaitingNote)
            )
            if note is not None and -_SKEW_SECONDS <= now - note[1] <= FRESH_SECONDS:
                awaited.add(uuid)
    return frozenset(awaited)


def put(notes: Notes, path: Path, note: Struct) -> None:
    """Write a note that changed, is not there, or grows old. Raises OSError."""
    data = msgspec.json.encode(note)
    before, at = notes.written.get(path, (b"", 0.0))
    if before != data or not path.exists() or time.monotonic() - at > FRESH_SECONDS / 3:
        write_note(path, data)
        notes.written[path] = data, time.monotonic()


def remove(notes: Notes, path: Path) -> None:
    """Remove a note of this daemon, or of an earlier life of it."""
    notes.written.pop(path, None)
    if path.is_symlink() or path.exists():
        with contextlib.suppress(OSError):
            path.unlink()
