"""Fetch a version from the daemon of another box into a directory here."""

import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from lorad.adapters.directory import TEMPORARY, verify
from lorad.client.answers import written
from lorad.client.transport import EXPORTED_HEADER, Transport
from lorad.errors import Conflict, DaemonUnreachable, IntegrityError, StorageError
from lorad.files import fsync, remove_tree
from lorad.models.hf.exported import name_base
from lorad.records.routes import Api
from lorad.records.versions import Exported

_MOST_FILES = 10_000


def fetch_version(http: Transport, version: str, directory: str) -> Exported:
    """Write the files of a version into a new or empty directory; they are verified before they are there.

    Raises Conflict for a directory with files, StorageError, IntegrityError, and DaemonUnreachable where the
    line breaks; then the directory is as it was.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} exists and is not empty", hint="Choose another directory.")
    answer = http.request(*written(Api.archive, None, {"version": version}))
    temporary = target.parent / f"{TEMPORARY}{target.name}-{os.getpid()}"
    try:
        with answer.file:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            try:
                _unpack(answer.file, temporary)
                verify(temporary)
                name_base(temporary)
                fsync(temporary)
                temporary.rename(target)  # an empty directory is replaced
                fsync(target.parent)
            finally:
                remove_tree(temporary)
    except (tarfile.TarError, EOFError, ConnectionError, TimeoutError) as error:
        message = f"the version broke off on its way: {error}"
        raise DaemonUnreachable(message, hint="Call it again; nothing was written.") from error
    except OSError as error:
        where = error.filename or target
        raise StorageError(f"{where}: {error.strerror}", hint="Choose another directory.") from error
    name, _, sha256 = answer.headers[EXPORTED_HEADER.lower()].partition(" ")
    return Exported(name, str(target), sha256)


def _unpack(file: IO[bytes], directory: Path) -> None:
    """Write the files of an archive into an empty directory: regular ones, by names that stay below it.

    Raises IntegrityError for everything else, and TarError or EOFError where it breaks off.
    """
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for number, member in enumerate(archive):
            path = PurePosixPath(member.name)
            is_plain = member.isreg() and not path.is_absolute() and ".." not in path.parts and path.parts
            if not is_plain or number >= _MOST_FILES:
                hint = "Do not trust that box."
                raise IntegrityError(f"the archive has {member.name!r}, which no version has", hint=hint)
            content = archive.extractfile(member)
            place = directory / path
            place.parent.mkdir(parents=True, exist_ok=True)
            remaining = member.size
            with place.open("xb") as copy:
                while content is not None and remaining and (piece := content.read(min(remaining, 1 << 20))):
                    copy.write(piece)
                    remaining -= len(piece)
                copy.flush()
                os.fsync(copy.fileno())
            if remaining:
                raise EOFError(f"{member.name} is not whole")
