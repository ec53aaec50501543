"""A real pool on `builtin:tiny` in a thread of the test, and what a driver asks of one."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lorad.models.directory import BUILTIN, linear_shapes, read_config
from lorad.pool.host import opened
from lorad.pool.service import PoolService
from lorad.pool.state import Pool
from lorad.protocol.batch import Batch, Chunk, Chunks, LossStats, PolicyLoss, PolicyTargets, Prompt, Sampling
from lorad.protocol.calls import (
    ForwardBackward,
    Generate,
    Nothing,
    Open,
    OptimStep,
    Publish,
    Published,
    Stepped,
)
from lorad.protocol.connection import Connection
from lorad.protocol.listener import listen
from lorad.protocol.pool_setup import PoolSetup

TINY = BUILTIN["builtin:tiny"]
SHAPES = linear_shapes(read_config(TINY))
MODULES = tuple(sorted(module for module in SHAPES if module != "lm_head"))
OPEN = Open(modules=MODULES, rank=8, alpha=16.0)
DEADLINE = 120.0  # seconds that a test waits for anything
_FIRST = 10  # tokens of a first turn's context, at most


def config_of(directory: Path, **changes: Any) -> PoolSetup:
    plain = PoolSetup(
        pool="p", model="builtin:tiny", model_path=str(TINY), socket=str(directory / "pool.sock")
    )
    return msgspec.structs.replace(plain, **changes)


class Running:
    """A pool that serves. `pool` belongs to its own thread: tests only look at it."""

    def __init__(self, config: PoolSetup, pool: Pool) -> None:
        self.config, self.pool = config, pool

    def connect(self, run: str = "", attempt: int = 1) -> Connection:
        return Connection(Path(self.config.socket), run=run, attempt=attempt, timeout=DEADLINE)


@contextlib.contextmanager
def running_pool(directory: Path, **changes: Any) -> Iterator[Running]:
    """A pool with its socket in `directory`, shut down at the end."""
    config, started = config_of(directory, **changes), Future[Running]()

    async def serve() -> None:
        async with opened(config, directory) as pool:
            with contextlib.closing(listen(Path(config.socket))) as listener:
                started.set_result(Running(config, pool))
                await PoolService(pool, listener).serve()

    def live() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            started.set_exception(error)

    thread = threading.Thread(target=live)
    thread.start()
    running = started.result(DEADLINE)
    try:
        yield running
    finally:
        with running.connect() as connection:
            connection.call("shutdown", Nothing())
        thread.join(DEADLINE)
        assert not thread.is_alive(), "the pool did not end"


@contextlib.contextmanager
def swapped(patch: Any) -> Iterator[list[int]]:
    """Whoever asks for a later turn of an episode gets tokens of another version, as if it had been swapped.

    Yields what was asked for: 0 for first turns, whose contexts are short, 1 for later ones.
    """
    stream, asked = Connection.stream, list[int]()

    def other(self: Connection, verb: str, args: Any) -> Iterator[Any]:
        is_later = verb == "generate" and min(prompt.tokens.size for prompt in args.prompts) > _FIRST
        asked.extend([int(is_later)] * (verb == "generate"))
        for item in stream(self, verb, args):
            is_tokens = isinstance(item, Chunks) and is_later
            yield msgspec.structs.replace(item, version="swapped@7") if is_tokens else item

    with patch.context() as changed:
        changed.setattr(Connection, "stream", other)
        yield asked


def until(condition: Callable[[], bool]) -> None:
    """Poll; fails after DEADLINE."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)


def prompts(count: int = 4, samples: int = 4, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [
        Prompt(
            str(i),
            rng.integers(4, 100, 6).astype(np.int32),
            rng.integers(0, 1 << 62, samples).astype(np.uint64),
        )
        for i in range(count)
    ]


def batch(seed: int = 0, samples: int = 8) -> ForwardBackward:
    """Something to learn from; the same for the same seed."""
    rng = np.random.default_rng(seed)
    groups = [
        (
            rng.integers(4, 100, 5).astype(np.int32),
            [rng.integers(4, 100, 10).astype(np.int32) for _ in range(4)],
        )
        for _ in range(samples // 4)
    ]
    made = Batch.of(groups)
    tokens = made.completions.size
    advantages = np.repeat(rng.normal(size=samples).astype(np.float32), made.completion_lengths)
    targets = PolicyTargets(advantages, np.full(tokens, -4.0, np.float32))
    return ForwardBackward(made, targets, PolicyLoss(), float(tokens))


def publish(connection: Connection, directory: Path, number: int) -> Published:
    target = str(directory / connection.run / "versions" / f"{number:06d}")
    published: Published = connection.call("publish", Publish(number, number, None, target))
    return published


def learn(connection: Connection, seed: int = 0, lr: float = 1e-3) -> Stepped:
    stats: LossStats = connection.call("forward_backward", batch(seed))
    assert stats.tokens > 0
    stepped: Stepped = connection.call("optim_step", OptimStep(lr, 1.0))
    return stepped


def generate(connection: Connection, version: str, tokens: int = 8, verb: str = "generate") -> list[Chunk]:
    *items, _ = connection.stream(verb, Generate(version, prompts(), Sampling(max_new_tokens=tokens)))
    return [chunk for item in items for chunk in item.split(prompts())]


def texts(chunks: list[Chunk]) -> dict[tuple[str, int], list[int]]:
    """The tokens of each sample, however they were cut into chunks."""
    joined: dict[tuple[str, int], list[int]] = {}
    for chunk in chunks:
        joined.setdefault((chunk.prompt, chunk.index), []).extend(chunk.tokens.tolist())
    return joined
