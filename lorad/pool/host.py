"""From a configuration to a pool that answers: one base, one compute thread, a trainer and an engine on it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import platform
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lorad
from lorad.engines.base import Engine
from lorad.errors import PoolLost
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.pool.config import PoolConfig
from lorad.pool.listener import listen, remove
from lorad.pool.service import Service
from lorad.pool.start import started
from lorad.pool.state import Pool
from lorad.protocol.calls import PoolInfo
from lorad.trainers.base import Trainer
from lorad.trainers.registry import trainer_class

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # between two looks at the engine
SOFTWARE = ("torch", "numpy", "safetensors")


async def run(config: PoolConfig, root: Path) -> None:
    """Serve until SIGTERM, SIGINT or a shutdown call. root: the pool's directory.

    Raises SpecError when the model or a backend is not usable, PoolLost when a server does not start.
    """
    async with opened(config, root) as pool:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, pool.stopping.set)
        path = Path(config.socket)
        with contextlib.closing(listen(path)) as listener:
            log.info("pool %s serves %s on %s", config.pool, config.model, config.socket)
            watch = asyncio.create_task(watch_engine(pool))
            try:
                await Service(pool, listener).serve()
            finally:
                watch.cancel()
                remove(path)
    log.info("pool %s is closed", config.pool)
    if watch.done() and not watch.cancelled():
        raise watch.result()


async def watch_engine(pool: Pool) -> PoolLost:
    """Stop the pool when its engine will never serve again: the next life of the pool begins with another one."""
    while (health := await pool.engine.health()).alive:  # noqa: ASYNC110 (health is polled)
        await asyncio.sleep(LOOK_SECONDS)
    pool.stopping.set()
    return PoolLost(f"the engine serves nobody any more: {health.detail}", hint="Resume the runs; a new pool starts.")


@asynccontextmanager
async def opened(config: PoolConfig, root: Path) -> AsyncIterator[Pool]:
    """The pool of a configuration, without its socket; closed at the end, with all files written."""
    compute = Compute()
    try:
        trainer_type: Any = trainer_class(config.trainer, config.trainer_class)
        async with started(config, compute, root) as (base, engine):
            trainer: Trainer = trainer_type(base, compute, config.model)
            info = await _info(config, trainer, engine, base)
            pool = Pool(info, trainer, engine, base.config.vocab_size)
            try:
                yield pool
            finally:
                await pool.close()
    finally:
        compute.close()


async def _info(config: PoolConfig, trainer: Trainer, engine: Engine, base: Base) -> PoolInfo:
    versions = {name: importlib.metadata.version(name) for name in SOFTWARE}
    return PoolInfo(
        pool=config.pool,
        pid=os.getpid(),
        model=config.model,
        model_path=config.model_path,
        base_checksum=await trainer.base_checksum(),
        trainer=config.trainer,
        engine=config.engine,
        mode=config.mode,
        device=config.device,
        dtype=str(base.dtype).removeprefix("torch."),
        threads=config.threads,
        max_tokens=min(trainer.capabilities().max_tokens, engine.capabilities().max_tokens),
        versions={"lorad": lorad.__version__, "python": platform.python_version(), **versions, **engine.software()},
    )
