"""The base on the pool's compute thread, and the engine: on the same base, or servers with a copy of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from lorad.engines.base import Engine
from lorad.engines.registry import engine_class
from lorad.engines.remote.settings import settings_of
from lorad.errors import SpecError
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import linear_shapes, read_config
from lorad.models.loading import load_base
from lorad.pool.config import PoolConfig, log_directory
from lorad.protocol.servers import ServerSetup

CPU_CACHE, LEAST_CACHE = 2 << 30, 256 << 20  # bytes for keys and values
TRAINER_SHARE = 1.2  # what the trainer keeps while it does not train, in sizes of its base: adapters and Adam states
LEAST_FRACTION = 0.1  # of a device: less is no room for any server


@asynccontextmanager
async def started(config: PoolConfig, compute: Compute, root: Path) -> AsyncIterator[tuple[Base, Engine]]:
    """The engine takes requests, and is closed at the end. root: the pool's directory.

    Raises SpecError when model, backend or mode is not usable, PoolLost with the end of its log when a server fails.
    """
    base, engine = await _base_and_engine(config, compute, root)
    try:
        _check_mode(config, engine)
        yield base, engine
    finally:
        await engine.close()


async def _base_and_engine(config: PoolConfig, compute: Compute, root: Path) -> tuple[Base, Engine]:
    engine_type: Any = engine_class(config.engine, config.engine_class)
    if config.server is None:
        base = await compute.run(_load, config)
        sizes = {"cache_bytes": _cache_bytes(config, base), "mix_calls": not config.deterministic}
        return base, engine_type(base, compute, Path(config.model_path), **sizes)
    if config.device != "cpu":  # servers take their share of what is free, so this has to be there first
        base = await compute.run(_load, config)
        return base, await _servers(engine_type, config, config.server, root, base.nbytes())
    servers = asyncio.create_task(_servers(engine_type, config, config.server, root, 0))
    try:
        return await compute.run(_load, config), await servers
    except BaseException:
        servers.cancel()
        (outcome,) = await asyncio.gather(servers, return_exceptions=True)
        if isinstance(outcome, Engine):
            await outcome.close()
        raise


async def _servers(engine_type: Any, config: PoolConfig, setup: ServerSetup, root: Path, base_bytes: int) -> Engine:
    model = Path(config.model_path)
    settings = settings_of(
        setup,
        model=model,
        dtype=_dtype_name(config),
        device=config.device,
        threads=config.threads,
        memory_fraction=_fraction(config, base_bytes),
        sleep=config.mode == "timesliced",
    )
    shapes = linear_shapes(read_config(model))
    engine: Engine = await engine_type.open(setup, settings, shapes, work=root, logs=log_directory(root))
    return engine


def _check_mode(config: PoolConfig, engine: Engine) -> None:
    """Raises SpecError for a mode that the engine cannot keep."""
    if config.server is not None and config.mode == "fused":
        raise SpecError(
            f"pool.mode: fused, but {config.engine} is a process of its own", hint="Use resident or timesliced."
        )
    if config.mode == "timesliced" and not engine.capabilities().sleep:
        raise SpecError(f"pool.mode: timesliced, but {config.engine} cannot sleep", hint="Use resident, or auto.")


def _load(config: PoolConfig) -> Base:
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"{config.device} was leased, but torch sees no GPU", hint="Run `lorad doctor`.")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread, which does all the work: streams and graphs are made there
    dtype = torch.float32 if _dtype_name(config) == "float32" else torch.bfloat16
    return load_base(Path(config.model_path), dtype, device)


def _dtype_name(config: PoolConfig) -> str:
    """`auto`: float32 on a CPU, whose bfloat16 is slow; else the checkpoint's own (float16 becomes bfloat16)."""
    wanted: str = config.dtype
    if wanted == "auto":
        wanted = "float32" if config.device == "cpu" else read_config(Path(config.model_path)).dtype
    return "float32" if wanted == "float32" else "bfloat16"


def _cache_bytes(config: PoolConfig, base: Base) -> int:
    """The same on each start, since samples that outgrow it are computed again, which is not bit for bit the same."""
    if base.device.type == "cpu":
        return CPU_CACHE
    left = int(_total(config) * config.memory_fraction) - base.nbytes()
    return max(LEAST_CACHE, left // 2)  # the other half is for training


def _fraction(config: PoolConfig, base_bytes: int) -> float:
    """Of the device's memory, for all servers: what the trainer leaves when it does not train, or half.

    Raises SpecError when that is no room.
    """
    if config.device == "cpu":
        return config.memory_fraction
    share = config.memory_fraction / 2
    if config.mode == "timesliced":
        share = config.memory_fraction - TRAINER_SHARE * base_bytes / _total(config)
    if share < LEAST_FRACTION:
        raise SpecError(
            f"{config.device}: {config.model} twice, for trainer and engine, does not fit",
            hint="Use rollout.backend: builtin, which shares one copy, or raise pool.memory_fraction.",
        )
    return share


def _total(config: PoolConfig) -> int:
    """Bytes of the device."""
    return int(torch.cuda.get_device_properties(torch.device(config.device)).total_memory)
