"""Start a pool from its configuration: make the trainer and the engine, and watch both while they serve."""

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import platform
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch

import lorad
from lorad.box.paths import Home, default_home
from lorad.engines.base import Engine
from lorad.errors import PoolLost
from lorad.models.compute import Compute
from lorad.models.facts import ModelFacts, read_facts, weights_sha256
from lorad.pool.capacity import memory_for_adapters
from lorad.pool.service import Service
from lorad.pool.start import Training, started
from lorad.pool.state import Pool
from lorad.pool.work import Rate, peak_of
from lorad.protocol.heartbeat import HEART
from lorad.protocol.listener import answers, listen, remove
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.status import PoolInfo

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # between two looks at engine and trainer
LOOP_SECONDS = 1.0  # between two signs of life of the event loop
# without a daemon, which may be one that is restarted, before an idle pool ends by itself
_ALONE_SECONDS = 30.0
_SOFTWARE = ("torch", "numpy", "safetensors")


async def run(config: PoolSetup, root: Path) -> None:
    """Serve until SIGTERM, SIGINT or a shutdown call. root: the pool's directory.

    Raises SpecError when the model or a backend is not usable, PoolLost when a process of theirs does not
    start, or engine or trainer will never serve again.
    """
    pulse = asyncio.create_task(follow_loop())
    async with opened(config, root) as pool:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, pool.stopping.set)
        path = Path(config.socket)
        with contextlib.closing(listen(path)) as listener:
            log.info("pool %s serves %s on %s", config.pool, config.model, config.socket)
            watch = asyncio.create_task(watch_both(pool))
            alone = asyncio.create_task(_end_when_alone(pool, config, Home(default_home())))
            try:
                await Service(pool, listener).serve()
            finally:
                watch.cancel()
                alone.cancel()
                remove(path)
    pulse.cancel()
    log.info("pool %s is closed", config.pool)
    if watch.done() and not watch.cancelled():
        raise watch.result()


async def follow_loop() -> None:
    """Beat once per LOOP_SECONDS, so that the heartbeat shows when something blocks the loop."""
    while True:
        HEART.looped()
        await asyncio.sleep(LOOP_SECONDS)


async def watch_both(pool: Pool) -> PoolLost:
    """Stop the pool when its engine or trainer will never serve again: the next life of the pool begins with
    others.
    """
    while not (lost := await _what_is_lost(pool)):  # noqa: ASYNC110 (health is polled)
        await asyncio.sleep(LOOK_SECONDS)
    pool.stopping.set()
    return PoolLost(lost, hint="Resume the runs; a new pool starts.")


async def _end_when_alone(pool: Pool, config: PoolSetup, home: Home) -> None:
    """Stop a pool that nobody has needed for a while, when no daemon is there to end it and
    free its devices.
    """
    alone_since, patience = time.monotonic(), min(_ALONE_SECONDS, max(config.idle_timeout, 1.0))
    while (now := time.monotonic()) - alone_since <= patience:
        if is_needed(pool, config, home):
            alone_since = now
        await asyncio.sleep(min(LOOK_SECONDS, patience / 4))
    log.info("pool %s: no daemon, and idle for %.0f s: it ends", config.pool, pool.meter.idle_seconds)
    pool.stopping.set()


def is_needed(pool: Pool, config: PoolSetup, home: Home) -> bool:
    """Return whether the pool was used lately, has a driver connected, or has a daemon to decide when it
    ends.

    Versions that aliases and pins keep loaded also need it, as long as a gateway can serve them.
    """
    if pool.meter.drivers or pool.meter.idle_seconds <= config.idle_timeout or answers(home.socket):
        return True
    is_shared = home.gateway_of(os.getuid()).is_dir()
    gateway = home.gateway_socket_of(os.getuid()) if is_shared else home.gateway_socket
    return bool(pool.loaded.kept()) and answers(gateway)


async def _what_is_lost(pool: Pool) -> str:
    """Describe which of engine and trainer was lost; "" while both are alive."""
    engine, trainer = await pool.engine.health(), await pool.work.health()
    if not engine.alive:
        return f"the engine serves nobody any more: {engine.detail}"
    return "" if trainer.alive else f"the trainer works for nobody any more: {trainer.detail}"


@asynccontextmanager
async def opened(config: PoolSetup, root: Path) -> AsyncIterator[Pool]:
    """Provide the pool of a configuration, without its socket; closed at the end, with all files written."""
    compute = Compute()
    try:
        digest = asyncio.create_task(asyncio.to_thread(weights_sha256, Path(config.model_path)))
        try:
            async with started(config, compute, root) as (training, engine):
                facts = read_facts(Path(config.model_path))
                info = _info(config, training, engine, facts, await digest)
                pool = Pool(
                    info,
                    training.trainer,
                    engine,
                    lodger=training.lodger,
                    rate=_rate(config, info.dtype, facts),
                    joins=not config.deterministic and config.ranks is None,
                    memory=memory_for_adapters(config),
                )
                try:
                    yield pool
                finally:
                    await pool.close()
        finally:
            await asyncio.gather(digest, return_exceptions=True)
    finally:
        compute.close()


def _info(
    config: PoolSetup, training: Training, engine: Engine, facts: ModelFacts, model_sha256: str
) -> PoolInfo:
    """Describe the pool; a separate trainer's package versions are under `trainer.`, since this process may
    have others.
    """
    trainer = training.trainer.capabilities()
    here = {name: importlib.metadata.version(name) for name in _SOFTWARE}
    there = {f"trainer.{name}": version for name, version in training.trainer.software().items()}
    return PoolInfo(
        pool=config.pool,
        pid=os.getpid(),
        model=config.model,
        model_path=config.model_path,
        base_checksum=training.checksum,
        trainer=config.trainer,
        engine=config.engine,
        mode=config.mode,
        device=config.device,
        dtype=trainer.dtype,
        threads=config.threads,
        max_tokens=min(trainer.max_tokens, engine.capabilities().max_tokens),
        versions={
            "lorad": lorad.__version__,
            "python": platform.python_version(),
            **here,
            **there,
            **engine.software(),
        },
        model_sha256=model_sha256,
        parameters=facts.parameters,
    )


def _rate(config: PoolSetup, dtype: str, facts: ModelFacts) -> Rate | None:
    """None on a CPU, in another dtype than the table is of, and for a GPU that is not in it."""
    if config.device == "cpu" or dtype != "bfloat16":
        return None
    ranks = config.ranks.ranks if config.ranks is not None else 1
    peak = peak_of(torch.cuda.get_device_name(torch.device(config.device)))
    return None if peak is None else Rate(facts.active, ranks * peak)
