"""Bundles: files that clients on other machines send along with a spec, in which the runs of it begin.

`bundles/UID/SHA256/` has the files of one, which belong to that user; until it is whole, `.part-SHA256`
beside it has what has come: a line of JSON, which lists names and sizes, and the contents in this order.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PurePosixPath

import msgspec

from lorad.bounds import BUNDLE_BYTES, BUNDLE_FILES, BUNDLES, MIB, PATH_CHARACTERS
from lorad.daemon.context import Context, request_of
from lorad.daemon.process.user_files import own_directory, passable
from lorad.daemon.storage.prune import Doomed, listed
from lorad.errors import Conflict, LoradError, SpecError, StorageError
from lorad.files import fsync, opened_whole, remove_tree
from lorad.records.checks import Bundle
from lorad.records.requests import BundleRequest
from lorad.store import runs

_BUNDLES = "bundles"
_PART = ".part-"
_NEW = ".new-"
_UNUSED_SECONDS = 3600.0  # a bundle is there before its run


def bundles_of(ctx: Context, uid: int) -> Path:
    """Make the directory of a user's bundles, and return it. Raises StorageError."""
    directory = ctx.home.root / _BUNDLES / str(uid)
    user = ctx.user(uid)
    try:
        directory.parent.mkdir(exist_ok=True, mode=0o700)
        if ctx.users.shared:
            passable(directory.parent)
        if user is None:
            directory.mkdir(exist_ok=True, mode=0o700)
        else:
            own_directory(directory, user)
    except OSError as error:
        raise _unusable(directory, error) from error
    return directory


def take_in(directory: Path, sha256: str, part: BundleRequest) -> Bundle:
    """Write down the next part of a bundle, and unpack the bundle with the last. Called as its user.

    Raises Conflict for a user who has too many, SpecError for bytes with another sha256 and for what is no
    bundle, and StorageError.
    """
    place = directory / sha256
    partial = directory / f"{_PART}{sha256}"
    try:
        if place.is_dir():
            os.utime(place)  # a run may begin in it soon
            return Bundle(sha256, part.size, str(place))
        received = partial.lstat().st_size if os.path.lexists(partial) else 0
        if not received and len(listed(directory)) >= BUNDLES:
            hint = "`lorad gc` deletes those in which no run of yours begins; `lorad rm` those runs."
            raise Conflict(f"you have {BUNDLES} bundles of files here, as many as may be", hint=hint)
        if part.data and part.offset == received and received + len(part.data) <= part.size:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(partial, flags, 0o600), "wb") as file:
                file.seek(received)  # where the same part has come twice it is written twice
                file.write(part.data)
            received += len(part.data)
        if received < part.size:
            return Bundle(sha256, received, "")
        try:
            with opened_whole(partial, BUNDLE_BYTES) as file:
                _unpack(file, sha256, place)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from error
    return Bundle(sha256, part.size, str(place))


def _unusable(directory: Path, error: OSError) -> StorageError:
    return StorageError(f"{error.filename or directory}: {error.strerror}", hint="Free some space there.")


def _unpack(file: BufferedReader, sha256: str, place: Path) -> None:
    """Write the files of a bundle into a directory, which is there whole or not at all."""
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
        raise SpecError("what was sent has another sha256 than was said", hint="Send it again.")
    end = file.tell()
    file.seek(0)
    try:
        listing = msgspec.json.decode(file.readline(MIB), type=list[tuple[str, int]])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SpecError(f"what was sent is no bundle: {error}", hint="Send it by `lorad --send`.") from None
    for name, size in listing:
        path = PurePosixPath(name)
        is_below = path.parts and not path.is_absolute() and ".." not in path.parts and str(path) == name
        if not is_below or "\0" in name or len(name) > PATH_CHARACTERS or size < 0:
            raise SpecError(f"a bundle has no file {name[:80]!r}", hint="Send it by `lorad --send`.")
    files = dict(listing)
    is_clear = len(files) == len(listing) <= BUNDLE_FILES
    if not is_clear or file.tell() + sum(files.values()) != end:
        raise SpecError("the sizes of the bundle's files are not its own", hint="Send it by `lorad --send`.")
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=place.parent))
    try:
        for name, size in files.items():
            target = new / name
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            remaining = size
            with target.open("xb") as copy:
                while piece := file.read(min(remaining, MIB)):
                    copy.write(piece)
                    remaining -= len(piece)
            fsync(target)
        fsync(new)
        with contextlib.suppress(FileExistsError):  # the same came twice at once
            new.rename(place)
        fsync(place.parent)
    finally:
        remove_tree(new)


def unused_bundles(ctx: Context, uid: int | None = None) -> Iterator[Doomed]:
    """Find the bundles of a user, or of everybody, in which no run begins, and parts of unfinished ones."""
    root = ctx.home.root / _BUNDLES
    places = [root / str(uid)] if uid is not None else listed(root)
    paths = [path for place in places for path in listed(place)]
    if not paths:
        return
    try:
        used = {request_of(run).cwd for run in runs.every(ctx.store)}
    except LoradError:  # where one begins is not known: everything stays
        return
    for path in paths:
        with contextlib.suppress(OSError):
            if str(path) not in used and time.time() - path.lstat().st_mtime > _UNUSED_SECONDS:
                yield Doomed("", path, "bundle", "no run begins in it")
