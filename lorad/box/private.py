"""Read keys and tokens, whose files only their owner may read.

Processes with the standard library alone have rules of their own: see `read_secret` of
`lorad/daemon/process/shim.py` and `lorad/grants/ray_token.py`.
"""

import os
import stat
from pathlib import Path

from lorad.errors import SpecError
from lorad.files import expanded, open_file, read_bounded

_KEY_BYTES = 4096


def read_private(path: Path, limit: int, *, links: bool = True) -> bytes:
    """Read a file of at most `limit` bytes that this user, or root, owns and nobody else may read.

    The open file is looked at, so that no other takes its place between the look and the reading.

    Raises SpecError for a file that is not private, whose message does not quote the file, and OSError.
    """
    with open_file(path, links=links) as file:
        about = os.fstat(file.fileno())
        mode = stat.S_IMODE(about.st_mode)
        if mode & 0o077:
            raise SpecError(f"{path} is readable by others (mode {mode:04o})", hint=f"chmod 600 {path}")
        if about.st_uid not in (os.geteuid(), 0):
            raise SpecError(
                f"{path} belongs to user {about.st_uid}", hint="Use a copy of your own, with mode 600."
            )
        return read_bounded(file, path, limit)


def read_key(path: str) -> str:
    """Read a file that has one key on one line. Raises SpecError, whose message does not contain the key."""
    advice = f"It holds the key alone: chmod 600 {path}."
    try:
        key = read_private(expanded(path), _KEY_BYTES).decode().strip()
    except SpecError as error:
        raise SpecError(error.problem, hint=advice) from None
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}", hint=advice) from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} holds no text", hint=advice) from None
    if not key or len(key.split()) != 1:
        raise SpecError(f"{path} holds no key", hint=advice)
    return key
