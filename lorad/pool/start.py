"""The pool's two sides: a trainer and an engine, on one base in this process, or apart, each with its own."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lorad.backends.registry import engine_class, trainer_class
from lorad.engines.base import Engine
from lorad.errors import SpecError
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.facts import ModelFacts, read_facts
from lorad.models.loading import load_base
from lorad.pool.capacity import dtype_of, engine_cache, server_share
from lorad.pool.config import log_directory
from lorad.protocol.pool_setup import PoolSetup, RanksSetup, ServerSetup
from lorad.trainers.base import Trainer
from lorad.trainers.ranks.remote import RanksSettings


@dataclass(frozen=True)
class Training:
    """A trainer that is there. checksum: of its base. lodger: see `lorad/pool/phases.py`."""

    trainer: Trainer
    checksum: str
    lodger: Trainer | None = None


@asynccontextmanager
async def started(config: PoolSetup, compute: Compute, root: Path) -> AsyncIterator[tuple[Training, Engine]]:
    """Trainer and engine take requests, and are ended at the end. root: the pool's directory.

    Raises SpecError when model, backend or mode is not usable, PoolLost with the end of its log when a
    process of theirs fails; then, and when it is cancelled, nothing of them is left.
    """
    training, engine = await _Start(config, compute, root).both()
    try:
        _check_mode(config, engine)
        yield training, engine
    finally:
        try:
            await engine.close()
        finally:
            await training.trainer.shut_down()


class _Start:
    def __init__(self, config: PoolSetup, compute: Compute, root: Path) -> None:
        self.config, self.compute, self.root = config, compute, root
        self.facts: ModelFacts = read_facts(Path(config.model_path))
        self.trainer_type: Any = trainer_class(config.trainer, config.trainer_class)
        self.engine_type: Any = engine_class(config.engine, config.engine_class)

    async def both(self) -> tuple[Training, Engine]:
        """Side by side on a CPU.

        An engine on a GPU takes its share of what is free, so the trainer comes first.
        """
        config = self.config
        if config.ranks is None and config.server is None:
            base = await self.compute.run(_load, config, self.facts)
            engine = self._engine_on(base, own=False)
            return await self._training_on(base), engine
        if config.device == "cpu":
            return await _side_by_side(self._training(), self._engine())
        training = await self._training()
        try:
            return training, await self._engine()
        except BaseException:
            await training.trainer.shut_down()
            raise

    async def _training(self) -> Training:
        if self.config.ranks is None:
            return await self._training_on(await self.compute.run(_load, self.config, self.facts))
        trainer = await self._ranks(self.config.ranks)
        try:
            checksum = await trainer.base_checksum()
            is_lodger = self.config.mode == "timesliced" and trainer.capabilities().offload
            if is_lodger:
                await trainer.offload()
            return Training(trainer, checksum, trainer if is_lodger else None)
        except BaseException:
            await trainer.shut_down()
            raise

    async def _training_on(self, base: Base) -> Training:
        trainer: Trainer = self.trainer_type(base, self.compute, self.config.model)
        return Training(trainer, await trainer.base_checksum())

    async def _ranks(self, setup: RanksSetup) -> Trainer:
        config = self.config
        gpus = (config.devices or (config.device,))[: setup.ranks]
        settings = RanksSettings(
            backend=config.trainer,
            model=Path(config.model_path),
            name=config.model,
            dtype=dtype_of(config, self.facts),
            devices=("cpu",) if config.device == "cpu" else gpus,
            threads=max(1, config.threads // setup.ranks),
            hang=config.hang,
        )
        logs = log_directory(self.root)
        trainer: Trainer = await self.trainer_type.start(setup, settings, work=self.root, logs=logs)
        return trainer

    async def _engine(self) -> Engine:
        if self.config.server is not None:
            return await self._servers(self.config.server)
        return self._engine_on(await self.compute.run(_load, self.config, self.facts), own=True)

    def _engine_on(self, base: Base, *, own: bool) -> Engine:
        """own: the trainer has a base of its own beside this one."""
        cache = engine_cache(self.config, self.facts, base, own=own)
        engine: Engine = self.engine_type(
            base,
            self.compute,
            Path(self.config.model_path),
            cache_bytes=cache,
            mix_calls=not self.config.deterministic,
        )
        return engine

    async def _servers(self, setup: ServerSetup) -> Engine:
        # with aiohttp, which a builtin pool does without
        from lorad.engines.remote.settings import settings_of

        config = self.config
        settings = settings_of(
            setup,
            model=Path(config.model_path),
            dtype=dtype_of(config, self.facts),
            device=config.device,
            devices=max(1, len(config.devices)),
            threads=config.threads,
            memory_fraction=server_share(config, self.facts),
            sleep=config.mode == "timesliced",
        )
        logs = log_directory(self.root)
        engine: Engine = await self.engine_type.open(
            setup, settings, self.facts.linears, work=self.root, logs=logs
        )
        return engine


async def _side_by_side(
    training: Coroutine[Any, Any, Training], engine: Coroutine[Any, Any, Engine]
) -> tuple[Training, Engine]:
    """Start both, or neither: when one fails, the other is ended too."""
    first, second = asyncio.create_task(training), asyncio.create_task(engine)
    try:
        await asyncio.wait([first, second], return_when=asyncio.FIRST_EXCEPTION)
        for task in (first, second):
            if task.done():
                task.result()
        return await first, await second
    except BaseException:
        first.cancel()
        second.cancel()
        there, beside = await asyncio.gather(first, second, return_exceptions=True)
        if isinstance(beside, Engine):
            await beside.close()
        if isinstance(there, Training):
            await there.trainer.shut_down()
        raise


def _check_mode(config: PoolSetup, engine: Engine) -> None:
    """Raise SpecError for a mode that the two sides cannot keep."""
    apart = {config.trainer: config.ranks is not None, config.engine: config.server is not None}
    if config.mode == "fused" and any(apart.values()):
        name = next(name for name, is_apart in apart.items() if is_apart)
        raise SpecError(
            f"fused, but {name} is a process of its own", key="pool.mode", hint="Use resident or timesliced."
        )
    if config.mode == "timesliced" and not engine.capabilities().sleep:
        raise SpecError(
            f"timesliced, but {config.engine} cannot sleep", key="pool.mode", hint="Use resident, or auto."
        )


def _load(config: PoolSetup, facts: ModelFacts) -> Base:
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"{config.device} was leased, but torch sees no GPU", hint="Run `lorad doctor`.")
    if device.type == "cuda":
        # of this thread, which does all the work: streams and graphs are made there
        torch.cuda.set_device(device)
    dtype = torch.float32 if dtype_of(config, facts) == "float32" else torch.bfloat16
    return load_base(Path(config.model_path), dtype, device)
