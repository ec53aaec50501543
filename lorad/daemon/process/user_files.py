"""Make the parts of a shared daemon's home that belong to users: they lie in directories of the daemon's, so
that nobody can put something else in their place.

    runs/NAME/            0711, the daemon's: spec, request, runtime; only its owner gets through
        journal.jsonl     0600, the owner's, as all of versions/ checkpoints/ samples/ loggers/ origin/
                          tinker/ (0700)
        attempts/NNNN/    0711, the daemon's: lock, command, status, log
            work/         0700, the owner's: params, spec, heartbeat, logs of servers
    pools/ID/             0711, the daemon's: pool.json, attempts/ as above; only its owner gets through
        work/             0700, the owner's: a copy of pool.json, the socket

Where `user` is None everything belongs to the daemon, and nothing of this is done.
"""

import errno
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from lorad.box.paths import AttemptDir, RunDir
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.users import User
from lorad.errors import IntegrityError
from lorad.files import fsync, open_file, write_whole

_PASSABLE = 0o711  # others may go through, and see nothing
_LIST = "system.posix_acl_access"
_NO_ID = 0xFFFFFFFF  # stands in an entry of such a list that names no user
_OWN_DIRECTORY = 0o700
_OWN_FILE = 0o600
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


def passable(*directories: Path) -> None:
    """Make directories of the daemon's, unless they are there, through which others may pass."""
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(_PASSABLE)


def passable_for(uid: int, directory: Path) -> None:
    """Make a directory of the daemon's, unless it is there, through which only this user may pass. Others
    cannot ask for names inside, and so learn neither sizes nor times. Where the file system has no access
    lists, everybody may pass.
    """
    passable(directory)
    entries = (  # as <sys/acl.h> numbers them
        (1, 7, _NO_ID),  # the directory's owner may do everything
        (2, 1, uid),  # this user may pass
        (4, 0, _NO_ID),  # its group may do nothing
        (16, 1, _NO_ID),  # the mask: the two before this one may pass at most
        (32, 0, _NO_ID),  # others may do nothing
    )
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(directory, _LIST, packed)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS):
            raise


def make_run(run: RunDir, user: User | None) -> None:
    """Make the directories that the driver and the pool of a run write into. Repeating it changes nothing."""
    if user is None:
        return
    passable_for(user.uid, run.root)
    for directory in run.written:
        own_directory(directory, user)
    own_file(run.journal, user)


def make_attempt(attempt: AttemptDir, user: User | None) -> AttemptDir:
    """Make the directory of an attempt before its process is started."""
    if user is None:
        attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    else:
        passable(attempt.root.parent, attempt.root)
        own_directory(attempt.root / "work", user)
    return attempt


def make_pool(root: Path, setup: Any, user: User | None) -> None:
    """Copy `pool.json` for the pool's process; the daemon itself uses `root/pool.json`."""
    if user is not None:
        passable_for(user.uid, root)
        _put_json(own_directory(root / "work", user) / "pool.json", setup, user)


def hand_over(attempt: AttemptDir, files: Mapping[str, Any], user: User | None) -> None:
    """Write the files that a process reads when it starts to where it looks for them."""
    for name, data in files.items():
        if user is not None:
            _put_json(attempt.work / name, data, user)
        elif attempt.work / name != attempt.spec:  # the spec is there already
            write_json(attempt.work / name, data, durable=False)


def own_directory(path: Path, user: User) -> Path:
    """Make a directory of the user's inside one of the daemon's.

    After a power cut it may have to be made again. Raises OSError when something else is there.
    """
    path.mkdir(exist_ok=True, mode=_OWN_DIRECTORY)
    _give(path, os.O_RDONLY | os.O_DIRECTORY, _OWN_DIRECTORY, user)
    return path


def own_file(path: Path, user: User) -> None:
    """Make an empty file of the user's, unless it is there already."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, _OWN_FILE))
    except FileExistsError:
        return
    _give(path, os.O_WRONLY, _OWN_FILE, user)
    fsync(path)
    fsync(path.parent)


def _give(path: Path, flags: int, mode: int, user: User) -> None:
    fd = os.open(path, flags | _OPEN)
    try:
        os.fchmod(fd, mode)
        os.fchown(fd, user.uid, user.gid)
    finally:
        os.close(fd)


def _put_json(path: Path, data: Any, user: User) -> None:
    """Write a file for a process of the user's; it need not survive a power cut, as the process does not."""
    with as_user(user):
        write_whole(path, json.dumps(data).encode(), mode=_OWN_FILE, durable=False)


def refuse_strange_journal(run: RunDir, user: User | None) -> None:
    """Raise IntegrityError unless the journal of a user's run is a file of the user's with no other name.

    Nobody can replace it between this check and the reading, as its directory is the daemon's.
    """
    if user is None:
        return
    try:
        status = run.journal.lstat()
    except FileNotFoundError:
        return
    wrong = ""
    if not stat.S_ISREG(status.st_mode):
        wrong = "is no file"
    elif status.st_uid != user.uid:
        wrong = f"belongs to user {status.st_uid}, the run to {user.name}"
    elif status.st_nlink != 1:
        wrong = f"has {status.st_nlink} names"
    if wrong:
        raise IntegrityError(
            f"{run.journal} {wrong}: it is not read", hint="Somebody changed it; put it back."
        )


def files_into(
    source: Path, target: Path, names: Iterable[str], owner: User | None, reader: User | None
) -> None:
    """Copy files of `owner` into `target`, an empty directory of `reader`, and sync them to disk.

    Neither user gets access to more than they may open themselves.

    Raises OSError, and IntegrityError for a name that leads out of the directory.
    """
    for name in names:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise IntegrityError(
                f"{source}: its manifest names {name!r}", hint="Somebody changed it; do not use it."
            )
        with as_user(owner):
            file = open_file(source / name, links=False)
        with file, as_user(reader):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with open(target / name, "xb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
    with as_user(reader):
        for path in (*(path for path in target.rglob("*") if path.is_dir()), target):
            fsync(path)
