"""The daemon's own journal, `LORAD_HOME/journal.jsonl`: runs created, moved and removed, by whom. Fsynced."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class DaemonJournal:
    """Appends one JSON line for each fact: {at, kind, run, by, …}. A torn last line is closed before the next one."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, kind: str, run: str, by: str, **data: Any) -> None:
        """Raises OSError (disk full); then nothing was written."""
        line = json.dumps({"at": time.time(), "kind": kind, "run": run, "by": by} | data).encode() + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def close(self) -> None:
        os.close(self._fd)
