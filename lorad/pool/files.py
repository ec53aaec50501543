"""The files of published versions, which one thread writes in the background, in the order of publishing."""

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from lorad.adapters.adapter import Adapter
from lorad.adapters.directory import write_directory
from lorad.adapters.peft import write_peft
from lorad.errors import LoradError

log = logging.getLogger(__name__)
_PENDING = 4  # versions of a run that may wait for the disk: each holds its tensors


class VersionFiles:
    """Writes the files of versions in a thread of its own. A failed write fails each later call of its run.

    `base_model` is what the PEFT configuration names as the base.
    """

    def __init__(self, base_model: str) -> None:
        self._base_model = base_model
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")
        self._pending: dict[str, list[Future[Any]]] = {}

    def write(self, run: str, adapter: Adapter, directory: Path, facts: dict[str, Any]) -> None:
        """Begin to write, and return at once."""
        put = partial(write_peft, adapter, base_model=self._base_model)
        future = self._thread.submit(write_directory, directory, put, facts)
        future.add_done_callback(partial(_log_failure, directory))
        self._pending.setdefault(run, []).append(future)

    def check(self, run: str) -> None:
        """Raise what went wrong with the files of an earlier version of `run`; does not wait."""
        waiting = self._pending.get(run, [])
        for future in [future for future in waiting if future.done()]:
            if isinstance(error := future.exception(), LoradError):
                raise error
            if error is not None:
                raise LoradError(f"writing version files failed: {error!r}")
            waiting.remove(future)

    async def room(self, run: str) -> None:
        """Wait until few enough versions of `run` are waiting for the disk."""
        waiting = [future for future in self._pending.get(run, []) if not future.done()]
        if len(waiting) >= _PENDING:
            await asyncio.to_thread(wait, waiting[: len(waiting) - _PENDING + 1])

    async def flush(self, run: str) -> None:
        """Wait until every version of `run` is on disk. Raises what went wrong."""
        if futures := list(self._pending.get(run, [])):
            await asyncio.to_thread(wait, futures)
        self.check(run)

    async def forget(self, run: str) -> None:
        """Wait until nothing is being written for `run`; a later attempt does not hear of failures."""
        if futures := self._pending.pop(run, []):
            await asyncio.to_thread(wait, futures)

    def close(self) -> None:
        """Write what is pending, then end the thread."""
        self._thread.shutdown(wait=True)


def _log_failure(directory: Path, future: Future[Any]) -> None:
    if (error := future.exception()) is not None:
        log.error("the version for %s was not written: %s", directory, error)
