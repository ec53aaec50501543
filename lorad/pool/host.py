"""Start a pool from its configuration: make the trainer and the engine, and watch both while they serve."""

import asyncio
import importlib.metadata
import logging
import os
import platform
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from msgspec.structs import replace

import lorad
from lorad.backends.registry import engine_class, trainer_class
from lorad.backends.setup import served_experts
from lorad.box.paths import Home, default_home
from lorad.engines.base import Engine
from lorad.errors import PoolLost, SpecError
from lorad.limits.arguments import AXES, OWN_BASE
from lorad.limits.check import refuse
from lorad.limits.limit import BackendSetup
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.facts import ModelFacts, read_facts, weights_sha256
from lorad.models.loading import load_base
from lorad.models.ops import hold_to_same_bits
from lorad.models.products.choices import measure_products
from lorad.pool.capacity import dtype_of, engine_cache, memory_for_adapters, server_share
from lorad.pool.config import log_directory
from lorad.pool.ledger import Ledger
from lorad.pool.lodging import within_what_is_free
from lorad.pool.microbatches import lend_cache, room_for
from lorad.pool.service import PoolService
from lorad.pool.state import Pool
from lorad.pool.usage_file import keep_writing, usage_file_of
from lorad.pool.work import rate_of
from lorad.protocol.heartbeat import HEART
from lorad.protocol.listener import answers, listen, remove
from lorad.protocol.pool_setup import PoolSetup, RanksSetup
from lorad.protocol.status import PoolInfo
from lorad.trainers.base import Trainer
from lorad.trainers.ranks.remote import RanksSettings
from lorad.trainers.sharded.body import BodySettings

if TYPE_CHECKING:
    from lorad.grants.grant import Grant

log = logging.getLogger(__name__)
LOOK_SECONDS = 5.0  # between two looks at engine and trainer
LOOP_SECONDS = 1.0  # between two signs of life of the event loop
# without a daemon, which may be one that is restarted, before an idle pool ends by itself
_ALONE_SECONDS = 30.0
_SOFTWARE = ("torch", "numpy", "safetensors")


@dataclass(frozen=True)
class _Training:
    """The running trainer and, with distillation, the teacher's.

    Attributes:
        checksum: The checksum of the trainer's base.
        lodger: The same trainer, where its base leaves the devices while the engine is awake; else None.
    """

    trainer: Trainer
    checksum: str
    lodger: Trainer | None = None
    teacher: Trainer | None = None


@asynccontextmanager
async def _started(
    config: PoolSetup, facts: ModelFacts, compute: Compute, root: Path, grant: "Grant | None"
) -> AsyncIterator[tuple[_Training, Engine]]:
    """Start trainer and engine, in the pool's directory `root` and on the nodes of `grant`, for the block.

    Raises SpecError when model, backend or mode is not usable, PoolLost with the end of its log when a
    process of theirs fails; then, and when it is cancelled, nothing of them is left.
    """
    if config.engine_class is None or config.mode == "fused":  # an engine's own class may sleep
        mode = "auto" if config.mode == "resident" else config.mode  # the builtin two may be apart here
        parts = {name: getattr(config, name) for name in ("trainer", "engine", "quantize")}
        parts |= {axis: getattr(config.ranks, axis) for axis in AXES if config.ranks is not None}
        refuse(BackendSetup(**parts, mode=mode))
    async with AsyncExitStack() as trainers, AsyncExitStack() as engines:
        trainer_type = trainer_class(config.trainer, config.trainer_class)
        engine_type = engine_class(config.engine, config.engine_class)
        start = _Start(config, facts, compute, root, grant, trainer_type, engine_type, trainers, engines)
        training, engine = await start.both()
        if config.mode == "timesliced" and not engine.capabilities().sleep:
            why = f"timesliced, but {config.engine} cannot sleep"
            raise SpecError(why, key="pool.mode", hint="Use resident, or auto.")
        if grant is not None and grant.rollout and config.nodes is not None:
            replacing: Any = engine
            replacing.expect_nodes(config.nodes.patience)  # it may be without any server for so long

            async def replace_lost() -> None:
                while True:
                    replacing.replace_node(*await grant.returned.get())

            engines.callback(asyncio.create_task(replace_lost()).cancel)
        yield training, engine


@dataclass(frozen=True)
class _Start:
    """Starts trainer and engine. What has started is ended with the stack that it is put on."""

    config: PoolSetup
    facts: ModelFacts
    compute: Compute
    root: Path
    grant: "Grant | None"
    trainer_type: Any
    engine_type: Any
    trainers: AsyncExitStack
    engines: AsyncExitStack

    async def both(self) -> tuple[_Training, Engine]:
        """Start trainer and engine side by side on a CPU, and where each has devices of its own.

        An engine on the trainer's GPU takes its share of what is free, so the trainer comes first.
        """
        config = self.config
        parts = [config.trainer] * config.has_ranks + [config.engine] * (config.server is not None)
        HEART.tell(f"starting {' and '.join(parts)}" if parts else f"loading {config.model}")
        if config.mode == "fused" and config.ranks is not None:
            return await self._fused(config.ranks)
        if config.ranks is None and config.server is None and config.engine not in OWN_BASE:
            base = await self.compute.run(_load, config, self.facts)
            engine = self._engine_on(base, own=False)
            return await self._training_on(base), engine
        if config.device == "cpu" or config.rollout_devices:
            first = asyncio.create_task(self._training())
            second = asyncio.create_task(self._engine())
            try:
                return await asyncio.gather(first, second)
            except BaseException:  # when one fails, the other is ended too
                first.cancel()
                second.cancel()
                await asyncio.gather(first, second, return_exceptions=True)
                raise
        return await self._training(), await self._engine()

    async def _fused(self, setup: RanksSetup) -> tuple[_Training, Engine]:
        """Start a trainer of one rank and the engine over transformers on one base of this process."""
        # with transformers and PEFT, which other pools do without
        from lorad.trainers.fsdp.in_process import FusedTrainer

        config = self.config
        settings = BodySettings(
            model=config.model_path,
            dtype=dtype_of(config, self.facts),
            device=str(_place(config, self.facts)[1]),
            args=setup.args,
            quantize=config.quantize,
            whole=True,
        )
        trainer = await FusedTrainer.start(self.compute, settings, config.model)
        self.trainers.push_async_callback(trainer.shut_down)
        cache = partial(engine_cache, config, self.facts, own=False)
        about = Path(config.model_path), self.facts.linears, cache
        mix = not config.deterministic
        engine: Engine = self.engine_type.on(trainer.body, self.compute, *about, mix_calls=mix)
        self.engines.push_async_callback(engine.close)
        checksum = await trainer.base_checksum()
        return _Training(trainer, checksum, teacher=await self._teacher()), engine

    async def _training(self) -> _Training:
        config = self.config
        setup = config.ranks
        if setup is None:
            return await self._training_on(await self.compute.run(_load, config, self.facts))
        gpus = config.trainer_names[: setup.ranks]
        settings = RanksSettings(
            backend=config.trainer,
            model=Path(config.model_path),
            name=config.model,
            dtype=dtype_of(config, self.facts),
            devices=("cpu",) if config.device == "cpu" or self.grant is not None else gpus,
            threads=max(1, config.threads // setup.ranks),
            hang=config.hang,
            quantize=config.quantize,
        )
        logs = log_directory(self.root)
        more = {} if self.grant is None else {"hosts": self.grant.hosts}
        trainer: Trainer = await self.trainer_type.start(setup, settings, work=self.root, logs=logs, **more)
        self.trainers.push_async_callback(trainer.shut_down)
        checksum = await trainer.base_checksum()
        is_lodger = config.mode == "timesliced" and trainer.capabilities().offload
        if is_lodger:
            await trainer.offload()
        return _Training(trainer, checksum, trainer if is_lodger else None, await self._teacher())

    async def _training_on(self, base: Base) -> _Training:
        trainer: Trainer = self.trainer_type(base, self.compute, self.config.model)
        self.trainers.push_async_callback(trainer.shut_down)
        HEART.tell("hashing its weights")
        return _Training(trainer, await trainer.base_checksum(), teacher=await self._teacher())

    async def _teacher(self) -> Trainer | None:
        """Load the teacher into the pool's process, whose end is its end, also where the trainer is made of
        ranks: it is never trained, and needs the builtin trainer alone.
        """
        config = self.config
        if not config.teacher_path:
            return None
        kind: Any = self.trainer_type if config.ranks is None else trainer_class("builtin")
        base = await self.compute.run(_load, config, self.facts, config.teacher_path)
        teacher: Trainer = kind(base, self.compute, config.teacher)
        return teacher

    async def _engine(self) -> Engine:
        config = self.config
        if config.engine in OWN_BASE and config.engine_class is None:
            start = partial(self.engine_type.start, self.compute, Path(config.model_path), self.facts.linears)
            cache = partial(engine_cache, config, self.facts, own=True)
            place = partial(_place, config, self.facts)
            engine: Engine = await start(place, cache, mix_calls=not config.deterministic)
            self.engines.push_async_callback(engine.close)
            return engine
        if config.server is None:
            return self._engine_on(await self.compute.run(_load, config, self.facts), own=True)
        # with aiohttp, which a builtin pool does without
        from lorad.engines.remote.settings import settings_of

        names = config.server_names
        hosts = [] if self.grant is None else self.grant.rollout or self.grant.hosts
        settings = settings_of(
            config.server,
            model=Path(config.model_path),
            dtype=dtype_of(config, self.facts),
            device="cpu" if config.device == "cpu" else names[0],
            devices=max(len(names), sum(len(host.devices) for host in hosts)),
            threads=config.threads,
            memory_fraction=server_share(config, self.facts),
            sleep=config.mode == "timesliced",
        )
        shapes = {**self.facts.linears, **served_experts(config.engine, self.facts)}
        logs = log_directory(self.root)
        more = {} if self.grant is None else {"hosts": hosts}
        engine = await self.engine_type.open(
            config.server, settings, shapes, work=self.root, logs=logs, **more
        )
        self.engines.push_async_callback(engine.close)
        return engine

    def _engine_on(self, base: Base, *, own: bool) -> Engine:
        """Start an engine on a base; with `own` the trainer has a base of its own beside this one."""
        cache = engine_cache(self.config, self.facts, base, own=own)
        directory = Path(self.config.model_path)
        engine: Engine = self.engine_type(
            base, self.compute, directory, cache_bytes=cache, mix_calls=not self.config.deterministic
        )
        self.engines.push_async_callback(engine.close)
        return engine


@asynccontextmanager
async def _granted(config: PoolSetup, root: Path) -> AsyncIterator["Grant | None"]:
    """Hold the nodes of a pool over several machines; None for one of this machine alone.

    Raises SpecError for what cannot be on nodes, and what `Grant.lead` raises.
    """
    if config.nodes is None and (config.mode != "split" or config.rollout_devices):
        yield None
        return
    # with TLS, which other pools do without
    from lorad.grants.fits import checked_nodes
    from lorad.grants.grant import hold_nodes

    async with hold_nodes(checked_nodes(config), config.pool, root, log_directory(root)) as grant:
        yield grant


def _load(config: PoolSetup, facts: ModelFacts, path: str = "") -> Base:
    """Load the pool's model, or the one at `path` in the same dtype and without quantization."""
    dtype, device = _place(config, facts)
    quantize = None if path else config.quantize
    return load_base(Path(path or config.model_path), dtype, device, quantize)


def _place(config: PoolSetup, facts: ModelFacts) -> tuple[torch.dtype, torch.device]:
    """Return the dtype of the pool's bases and the device of those in its own process."""
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"{config.device} was leased, but torch sees no GPU", hint="Run `lorad doctor`.")
    if config.deterministic:
        hold_to_same_bits(device)
    return torch.float32 if dtype_of(config, facts) == "float32" else torch.bfloat16, device


async def run(config: PoolSetup, root: Path) -> None:
    """Serve a pool in its directory `root` until SIGTERM, SIGINT or a shutdown call.

    Raises SpecError when the model or a backend is not usable, PoolLost when a process of theirs does not
    start, or engine or trainer will never serve again.
    """
    pulse = asyncio.create_task(follow_loop())
    async with opened(config, root) as pool:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, pool.stopping.set)
        path = Path(config.socket)
        with closing(listen(path)) as listener:
            log.info("pool %s serves %s on %s", config.pool, config.model, config.socket)
            watch = asyncio.create_task(watch_both(pool))
            alone = asyncio.create_task(_end_when_alone(pool, config, Home(default_home())))
            try:
                await PoolService(pool, listener).serve()
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
    """Stop the pool when its engine or trainer will never serve again; its next life has new ones."""
    lost = ""
    while not lost:
        engine = await pool.engine.health()
        trainer = await pool.work.health()
        if not engine.alive:
            lost = f"the engine serves nobody any more: {engine.detail}"
        elif not trainer.alive:
            lost = f"the trainer works for nobody any more: {trainer.detail}"
        else:
            await asyncio.sleep(LOOK_SECONDS)
    pool.stopping.set()
    return PoolLost(lost, hint="Resume the runs; a new pool starts.")


async def _end_when_alone(pool: Pool, config: PoolSetup, home: Home) -> None:
    """Stop a pool that nobody has needed for a while and that no daemon will end."""
    alone_since = time.monotonic()
    patience = min(_ALONE_SECONDS, max(config.idle_timeout, 1.0))
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


@asynccontextmanager
async def opened(config: PoolSetup, root: Path) -> AsyncIterator[Pool]:
    """Provide the pool of a configuration, without its socket; closed at the end, with all files written."""
    config = await asyncio.to_thread(within_what_is_free, config)
    age = max(0.0, time.time() - psutil.Process().create_time())  # the pool's life began with this process
    nodes = config.nodes
    ledger = Ledger(
        devices=len(config.names) if nodes is None else nodes.bundles * max(1, nodes.devices),
        by_calls=config.has_ranks or config.server is not None,
        since=time.perf_counter() - age,
    )
    facts = read_facts(Path(config.model_path))
    is_builtin = config.device == "cpu" and (config.ranks is None or config.server is None)
    products = measure_products(facts.bytes("float32")) if is_builtin else ""
    compute = Compute(watch=ledger)
    try:
        digest = asyncio.create_task(asyncio.to_thread(_digests, config))
        try:
            async with (
                _granted(config, root) as grant,
                _started(config, facts, compute, root, grant) as (training, engine),
            ):
                info = _info(config, training, engine, facts, await digest)
                nodes_of_pool = () if grant is None else grant.placed(training.trainer.software())
                pool = Pool(
                    replace(info, products=products, nodes=nodes_of_pool),
                    training.trainer,
                    engine,
                    teacher=training.teacher,
                    lodger=training.lodger,
                    rate=rate_of(config, info.dtype, facts),
                    joins=not config.deterministic and config.ranks is None,
                    ledger=ledger,
                )
                HEART.tell("")
                pool.memory = memory_for_adapters(config)
                pool.room = room_for(config, facts)
                lend_cache(training.trainer, engine, pool.room)
                pool.attester.placeholders = facts.placeholders
                pool.uses = usage_file_of(config, root, pool.ledger, pool.machine)
                async with keep_writing(pool.uses):
                    try:
                        yield pool
                    finally:
                        await pool.close()
        finally:
            await asyncio.gather(digest, return_exceptions=True)
    finally:
        compute.close()


def _digests(config: PoolSetup) -> tuple[str, str]:
    """Digest the weight files of the model, and of the teacher, "" without one."""
    teacher = weights_sha256(Path(config.teacher_path)) if config.teacher_path else ""
    return weights_sha256(Path(config.model_path), config.quantize), teacher


def _info(
    config: PoolSetup, training: _Training, engine: Engine, facts: ModelFacts, sha256: tuple[str, str]
) -> PoolInfo:
    """Describe the pool, whose files have the digests `sha256`, see `_digests`; a separate trainer's package
    versions are under `trainer.`, since this process may have others.
    """
    trainer = training.trainer.capabilities()
    own_software = {name: importlib.metadata.version(name) for name in _SOFTWARE}
    trainer_software = {f"trainer.{name}": version for name, version in training.trainer.software().items()}
    same = ("pool", "model", "model_path", "trainer", "engine", "mode", "device", "threads", "teacher")
    of_config: dict[str, Any] = {name: getattr(config, name) for name in same}
    return PoolInfo(
        **of_config,
        pid=os.getpid(),
        base_checksum=training.checksum,
        dtype=trainer.dtype,
        max_tokens=min(trainer.max_tokens, engine.capabilities().max_tokens),
        versions={
            "lorad": lorad.__version__,
            "python": platform.python_version(),
            **own_software,
            **trainer_software,
            **engine.software(),
        },
        model_sha256=sha256[0],
        parameters=facts.parameters,
        experts=facts.expert_count,
        losses=trainer.losses,
        teacher_sha256=sha256[1],
        ranks=engine.capabilities().ranks,
        formats=engine.capabilities().formats,
        routes=trainer.routes is not None and trainer.routes == engine.capabilities().routes,
    )
