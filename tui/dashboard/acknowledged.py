"""Runs that ended and whose alarms one user has acknowledged: in a file of theirs, so that the next session
knows.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from lorad.client.shapes import Run
from lorad.errors import NotAllowed
from lorad.files import read_file

_KEPT = 48 * 3600.0  # seconds after a run's end: no alarm of it is older
_LARGEST = 1 << 20  # bytes


def _default_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lorad" / "acknowledged.json"


class Acknowledged:
    """Keeps what is in the file at first, and what is added. One thread reads it while another one adds."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or _default_path()
        self._ended = self._read()  # by run and end, when it ended

    def has(self, run: Run) -> bool:
        return _key(run) in self._ended

    def add(self, runs: Iterable[Run]) -> None:
        """Raises NotAllowed where the file cannot be written: it holds until the end of this session then."""
        added = {_key(run): float(run.ended_at or time.time()) for run in runs}
        self._ended = {**self._read(), **self._ended, **added}
        try:
            self._write({one: at for one, at in self._ended.items() if time.time() - at < _KEPT})
        except OSError as error:
            raise NotAllowed(
                f"Acknowledged until this session ends: {self._path}: {error.strerror}.",
                hint="XDG_STATE_HOME names another directory.",
            ) from error

    def _read(self) -> dict[str, float]:
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            return msgspec.json.decode(read_file(self._path, _LARGEST), type=dict[str, float])
        return {}

    def _write(self, ended: dict[str, float]) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(ended))
        beside.replace(self._path)


def _key(run: Run) -> str:
    """A run that is resumed and ends again has other alarms."""
    return f"{run.name} {run.ended_at}"
