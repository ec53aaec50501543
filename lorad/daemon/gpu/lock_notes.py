"""Notes beside the locks of GPUs, in which the daemons of all users read who holds a GPU and who waits for
it.

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
from lorad.files import open_file, read_bounded, write_whole
from lorad.text import one_line

_NOTE_BYTES = 8192
_MOST_ENTRIES = 4096  # entries read: everybody may write in the directory
FRESH_SECONDS = 30.0  # a daemon that waits writes its note again in a third of it
_SKEW_SECONDS = 5.0
LOOK_SECONDS = 2.0  # between two looks at what others want
_Text = Annotated[str, Meta(max_length=400)]
_Seconds = Annotated[float, Meta(ge=0, le=1e11)]
T = TypeVar("T", bound=Struct)


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

    uid: the user of the daemon.
    why: what it needs the device for.
    since: Unix time.
    """

    uid: int
    why: _Text
    since: _Seconds


@dataclass
class Notes:
    """The notes that this daemon wrote, and what it read in those of others.

    written: the bytes of each note by its path, and the monotonic time at which they were written.
    wanted: the GPUs that this pass of the loop waits for, by UUID, and what for.
    since: the Unix time since when a GPU is waited for, by UUID.
    idle_since: the Unix time since when a pool is idle, by its id.
    others: UUIDs that other daemons wait for.
    looked_at: the monotonic time of the last look at notes of others.
    """

    written: dict[Path, tuple[bytes, float]] = field(default_factory=dict)
    wanted: dict[str, str] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    idle_since: dict[str, float] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    looked_at: float = float("-inf")


def note_path(home: Path, uuid: str, kind: str) -> Path:
    """Name the file in which the daemon of `home` keeps its note of this kind."""
    home_name = hashlib.sha256(os.fsencode(home)).hexdigest()[:8]
    return devices.LOCKS / f"{uuid}.{kind}-{os.getuid()}-{home_name}.json"


def _notes_of(uuid: str, kind: str) -> Iterator[tuple[int, Path]]:
    """Yield all notes of this kind about a device: the uid in the file's name, and its path."""
    pattern = re.compile(re.escape(f"{uuid}.{kind}-") + r"(\d{1,10})-[0-9a-f]{8}\.json")
    with contextlib.suppress(OSError), os.scandir(devices.LOCKS) as entries:
        for entry in itertools.islice(entries, _MOST_ENTRIES):
            if match := pattern.fullmatch(entry.name):
                yield int(match[1]), Path(entry.path)


def _read_note(path: Path, uid: int, kind: type[T]) -> tuple[T, float] | None:
    """Read a note, and when it was written; None unless it is a small, readable file of that user's."""
    try:
        with open_file(path, links=False) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != uid:
                return None
            return msgspec.json.decode(read_bounded(file, path, _NOTE_BYTES), type=kind), status.st_mtime
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def holder_of(device: Device) -> Holder | None:
    """Read who holds the device from its holder's note; None when the device is free or has no such note."""
    if not device.uuid or not is_taken(device):
        return None
    believed = None
    pid = lock_pid(device)
    with contextlib.suppress(OSError):  # there may be no such process
        believed = {0, os.stat(f"/proc/{pid}").st_uid}
    notes: list[tuple[bool, float, Holder]] = []
    for uid, path in _notes_of(device.uuid, "holder"):
        note = _read_note(path, uid, Holder) if believed is None or uid in believed else None
        if note is not None and (uid == 0 or note[0].uid == uid):
            process = stat_of(note[0].pid or 0)  # a zombie counts
            is_present = process is not None and process.start == note[0].start_time
            notes.append((is_present, note[1], note[0]))
    if not notes:
        return None
    *_, holder = max(notes, key=lambda note: note[:2])
    shown = {"pool": one_line(holder.pool)[:80], "user": one_line(holder.user)[:32]}
    return msgspec.structs.replace(holder, **shown, why=one_line(holder.why)[:160])


def lock_pid(device: Device) -> int | None:
    """Find the process that locked the device, or whose child holds the lock; None when it is not listed."""
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
        own = note_path(home, uuid, "wanted")
        for uid, path in _notes_of(uuid, "wanted"):
            note = None if path == own else _read_note(path, uid, WaitingNote)
            if note is not None and -_SKEW_SECONDS <= now - note[1] <= FRESH_SECONDS:
                awaited.add(uuid)
    return frozenset(awaited)


def put(notes: Notes, path: Path, note: Struct) -> None:
    """Write a note, which everybody can read, when it changed, is not there, or grows old.

    Raises OSError, also when the file there belongs to another user.
    """
    data = msgspec.json.encode(note)
    before, at = notes.written.get(path, (b"", 0.0))
    if before != data or not path.exists() or time.monotonic() - at > FRESH_SECONDS / 3:
        gpu_locks.make_directory(devices.LOCKS)
        write_whole(path, data, mode=0o644, durable=False)
        notes.written[path] = data, time.monotonic()


def remove(notes: Notes, path: Path) -> None:
    """Remove a note of this daemon, or of an earlier life of it."""
    notes.written.pop(path, None)
    with contextlib.suppress(OSError):
        path.unlink()
