"""Writes what the ledger has to the file of the pool's life: see `USES` in lorad/protocol/status.py.

Lines are in the file within a second, where they survive the end of the process, and on disk a few seconds
later. Once much of the file is out of date, it is written anew, whole.
"""

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import torch

from lorad.files import write_whole
from lorad.files.log import AppendLog
from lorad.pool.config import log_directory
from lorad.pool.energy import Meter, meter_of
from lorad.pool.ledger import Ledger
from lorad.pool.lodging import uuids_of
from lorad.pool.machine import MachineMeter
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import USES, Uses, encode_uses

log = logging.getLogger(__name__)

_PERIOD = 1.0  # seconds between two lines
_REST = 10.0  # the same where nobody works
_SYNC = 5.0  # seconds that a power cut may take
_ROOM = 4 << 20  # bytes out of date


class UsageFile:
    """The file of uses. Every line repeats `head`, and `machine` is shown what the meter reads."""

    def __init__(
        self, path: Path, head: Uses, ledger: Ledger, meter: Meter | None, machine: MachineMeter | None = None
    ) -> None:
        self.path = path
        self._head = head
        self._ledger = ledger
        self._meter = meter
        self._machine = machine
        self._log: AppendLog[Uses] | None = None
        self._is_closed = False
        self._trouble = ""
        self._whole = self._synced = self._written = 0.0
        self._lock = threading.Lock()

    def write(self, *, all: bool = False, last: bool = False) -> None:
        """Write what changed. What the disk does not take is written the next time.

        Args:
            all: Whether to write also where no run has a slot.
            last: Whether to write all of it onto the disk, and close the file.
        """
        with self._lock:
            if not self._is_closed:
                self._write(all=all or last, last=last)
            if last and self._log is not None:
                self._log.close()
                self._log = None
            self._is_closed = self._is_closed or last

    def _write(self, *, all: bool, last: bool) -> None:
        reading = self._meter() if self._meter is not None else None
        if reading is not None and self._machine is not None:
            self._machine.sample(reading)
        memory = (reading.memory if reading is not None else 0) or psutil.Process().memory_info().rss
        uses = self._ledger.settle(reading.joules if reading is not None else None, memory)
        now = time.monotonic()
        if not (all or now - self._written >= _REST or any(use.run for use in uses)):
            self._ledger.put_back(uses)
            return
        try:
            if self._log is None:
                self._log = AppendLog(self.path, None, mends=True)
            line = msgspec.structs.replace(self._head, at=time.time(), uses=uses)
            is_due = last or now - self._synced >= _SYNC
            self._log.write(encode_uses(line), sync=is_due)
            self._written = now
            self._synced = now if is_due else self._synced
            if self._log.size > 2 * self._whole + _ROOM:
                whole = msgspec.structs.replace(line, uses=self._ledger.entries())
                write_whole(self.path, text := encode_uses(whole))
                self._log.close()
                self._log = None
                self._whole = float(len(text))
        except OSError as error:
            if self._trouble != str(error):
                log.error("%s: %s", self.path, error)
            self._trouble = str(error)
            self._ledger.put_back(uses)


@contextlib.asynccontextmanager
async def keep_writing(file: UsageFile) -> AsyncIterator[None]:
    """Write the file inside the block, and once more at its end."""
    task = asyncio.create_task(_keep(file))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        file.write(last=True)


async def _keep(file: UsageFile) -> None:
    while True:
        writing = asyncio.create_task(asyncio.to_thread(file.write))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise
        await asyncio.sleep(_PERIOD)


def usage_file_of(config: PoolSetup, root: Path, ledger: Ledger, machine: MachineMeter) -> UsageFile:
    """Return the file of uses; without energy on a CPU that pools share, whose counters are of all of it."""
    gpus = [] if config.device == "cpu" or config.nodes is not None else list(config.names)
    properties = [torch.cuda.get_device_properties(torch.device(gpu)) for gpu in gpus]
    is_own = bool(gpus) or not (config.devices or config.nodes)
    began = psutil.Process().create_time()
    head = Uses(
        life=uuid.uuid4().hex,
        pool=config.pool,
        device=properties[0].name if properties else config.device,
        devices=ledger.devices,
        since=began,
        at=began,
        uses=[],
    )
    meter = meter_of(uuids_of(gpus)) if is_own else None
    return UsageFile(log_directory(root) / USES, head, ledger, meter, machine)
