"""Reading `pool.json`, and where the pool's log is."""

import os
from pathlib import Path

import msgspec

from lorad.errors import SpecError
from lorad.protocol.pool_setup import PoolSetup

_FILE = "pool.json"


def read(directory: Path) -> PoolSetup:
    """Return the configuration of a pool. Raises SpecError when it is missing or not usable."""
    path = directory / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=PoolSetup)
    except OSError as error:
        raise SpecError(
            f"{path}: {error.strerror}", hint="The daemon writes it before it starts a pool."
        ) from error
    except msgspec.MsgspecError as error:
        raise SpecError(
            f"{path}: {error}", hint="Remove the pool's directory; the daemon makes a new one."
        ) from error


def log_directory(directory: Path) -> Path:
    """Return the directory of the pool's log, which is the newest attempt's, or the pool's own where it was
    started without a shim.

    A pool that belongs to another user than the daemon sees only the attempt that its shim names.
    """
    if (attempt := os.environ.get("LORAD_ATTEMPT")) and (theirs := Path(attempt) / "work").is_dir():
        return theirs
    return max((directory / "attempts").glob("[0-9]*"), default=directory)


def write(config: PoolSetup, directory: Path) -> None:
    """Put the configuration where `read` finds it."""
    (directory / _FILE).write_bytes(msgspec.json.encode(config))
