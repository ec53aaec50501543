"""Reading files that somebody else made, and writing files that others read at any moment.

Reading never blocks on a pipe or device and never takes more than it should. Writing puts a file in place
whole. What cannot be read or written raises OSError, whose `strerror` says what it is instead.

All append-only logs are `files/log.py`; its policies are arguments, so that a hazard has one answer.
`tests/test_files.py` holds the files, `tests/test_append_logs.py` breaks every log in the same ways.
"""

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from lorad.bounds import SPARSE
from lorad.errors import SpecError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
}


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with a beginning of `~` as the home that it means. Raises OSError where it is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        first = str(path).partition("/")[0]
        raise FileNotFoundError(errno.ENOENT, f"{first} is no user's home", str(path)) from None


def whole(path: str) -> Path:
    """Make the path that a setting means. Raises SpecError for a relative one, which begins nowhere."""
    place = expanded(path)
    if not place.is_absolute():
        raise SpecError(f"{path} is a relative path", hint="Write all of it, from / or ~ on.")
    return place


def is_name_of(path: Path, about: os.stat_result) -> bool:
    """Return whether `path` is a name of the file or directory that `about` describes."""
    try:
        return os.path.samestat(path.stat(), about)
    except (FileNotFoundError, NotADirectoryError):
        return False


def open_file(path: Path, *, links: bool = True) -> BufferedReader:
    """Open a regular file for reading; with `links`, `path` itself may be a symbolic link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.EINVAL, "a link, not a file", str(path)) from None
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.EINVAL, "not a file", str(path)) from None
        raise
    except ValueError:  # Python's own words for a NUL in a path
        raise OSError(errno.EINVAL, "no name of a file", str(path)) from None
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'something')}, not a file", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, limit: int, *, links: bool = True) -> bytes:
    """Read all of a regular file of at most `limit` bytes."""
    with open_file(path, links=links) as file:
        return read_bounded(file, path, limit)


def read_bounded(file: BufferedReader, path: Path, limit: int) -> bytes:
    """Read all of an open file of at most `limit` bytes."""
    size = os.fstat(file.fileno()).st_size
    data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return data


@contextlib.contextmanager
def opened_whole(path: Path, limit: int) -> Iterator[BufferedReader]:
    """Open a regular file of at most `limit` bytes, all of which are on disk, to be read piece by piece."""
    with open_file(path, links=False) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
        refuse_sparse(file, path)
        yield file


def remove_tree(path: Path) -> None:
    """Delete a directory, as deep as it may be, as far as that is possible."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:  # a user made it for that: `rm` goes down by descriptors
        command = ["rm", "-rf", "--one-file-system", "--", os.path.abspath(path)]
        null = subprocess.DEVNULL
        subprocess.run(command, stdin=null, stdout=null, stderr=null)


def refuse_sparse(file: BufferedReader, path: Path) -> None:
    """Raise OSError for a large file that is partly a hole, which costs nothing to make and much to read."""
    about = os.fstat(file.fileno())
    if about.st_size < SPARSE or 512 * about.st_blocks >= about.st_size:
        return
    # else compressed, or not written out yet
    if (hole := os.lseek(file.fileno(), 0, os.SEEK_HOLE)) < about.st_size:
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        problem = f"sparse: nothing was written at byte {hole} of {about.st_size}"
        raise OSError(errno.EFBIG, problem, str(path))
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def write_whole(
    path: Path, data: bytes, *, mode: int = 0o600, uid: int | None = None, durable: bool = True
) -> None:
    """Put a file in place by one rename: a reader finds all of it, or the file before.

    mode: what others may do with the file, whatever the umask.
    uid: the owner that the file gets; None for this process's user.
    durable: file and name are on disk when it returns.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if uid is not None:
                os.fchown(file.fileno(), uid, -1)
            if durable:
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Have a file, or a change of a directory, survive a power cut. Raises OSError, for a pipe at once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
