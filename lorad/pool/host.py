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

import torch

import lorad
from lorad.engines.base import Engine
from lorad.engines.registry import engine_class
from lorad.errors import SpecError
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import read_config
from lorad.models.loading import load_base
from lorad.pool.config import PoolConfig
from lorad.pool.listener import listen, remove
from lorad.pool.service import Service
from lorad.pool.state import Pool
from lorad.protocol.calls import PoolInfo
from lorad.trainers.base import Trainer
from lorad.trainers.registry import trainer_class

log = logging.getLogger(__name__)

CPU_CACHE, LEAST_CACHE = 2 << 30, 256 << 20  # bytes for keys and values
SOFTWARE = ("torch", "numpy", "safetensors")


async def run(config: PoolConfig) -> None:
    """Serve until SIGTERM, SIGINT or a shutdown call. Raises SpecError when the model or a backend is not usable."""
    async with opened(config) as pool:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, pool.stopping.set)
        path = Path(config.socket)
        with contextlib.closing(listen(path)) as listener:
            log.info("pool %s serves %s on %s", config.pool, config.model, config.socket)
            try:
                await Service(pool, listener).serve()
            finally:
                remove(path)
    log.info("pool %s is closed", config.pool)


@asynccontextmanager
async def opened(config: PoolConfig) -> AsyncIterator[Pool]:
    """The pool of a configuration, without its socket; closed at the end, with all files written."""
    compute = Compute()
    try:
        base = await compute.run(_load, config)
        trainer_type: Any = trainer_class(config.trainer, config.trainer_class)
        engine_type: Any = engine_class(config.engine, config.engine_class)
        trainer: Trainer = trainer_type(base, compute, config.model)
        engine: Engine = engine_type(
            base,
            compute,
            Path(config.model_path),
            cache_bytes=_cache_bytes(config, base),
            mix_calls=not config.deterministic,
        )
        info = await _info(config, trainer, engine, base)
        pool = Pool(info, trainer, engine, base.config.vocab_size)
        try:
            yield pool
        finally:
            await pool.close()
    finally:
        compute.close()


def _load(config: PoolConfig) -> Base:
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"{config.device} was leased, but torch sees no GPU", hint="Run `lorad doctor`.")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread, which does all the work: streams and graphs are made there
    directory = Path(config.model_path)
    return load_base(directory, _dtype(config, directory, device), device)


def _dtype(config: PoolConfig, directory: Path, device: torch.device) -> torch.dtype:
    """`auto`: float32 on a CPU, whose bfloat16 is slow; else the checkpoint's own (float16 becomes bfloat16)."""
    wanted = config.dtype
    if wanted == "auto":
        own = "float32" if device.type == "cpu" else read_config(directory).dtype
        wanted = "float32" if own == "float32" else "bfloat16"
    return torch.float32 if wanted == "float32" else torch.bfloat16


def _cache_bytes(config: PoolConfig, base: Base) -> int:
    """The same on each start, since samples that outgrow it are computed again, which is not bit for bit the same."""
    if base.device.type == "cpu":
        return CPU_CACHE
    total = torch.cuda.get_device_properties(base.device).total_memory
    left = int(total * config.memory_fraction) - base.nbytes()
    return max(LEAST_CACHE, left // 2)  # the other half is for training


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
        versions={"lorad": lorad.__version__, "python": platform.python_version(), **versions},
    )
