"""Where the real servers are, and what they are started with here."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lorad.backends.registry import engine_class
from lorad.children.host import Host
from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.remote.settings import settings_of
from lorad.models.directory import linear_shapes, read_config, resolve
from lorad.protocol.pool_setup import ServerSetup
from tests.kit.warm.servers import CPU, other_models

KINDS = ("sglang", "vllm")
TINY = resolve("builtin:tiny")
SHAPES = linear_shapes(read_config(TINY))
SECRET = "hush-7f3a9c"  # in the environment of every server here; nobody else may learn of it


def variable(kind: str) -> str:
    return f"LORAD_{kind.upper()}_PYTHON"


def python_of(kind: str) -> str:
    """The interpreter of a kind's virtual environment; "" where it is not named."""
    return os.environ.get(variable(kind), "")


ENVIRONMENT = {
    "sglang": {
        "PYTHONPATH": CPU["sglang"],
        "HF_TOKEN": SECRET,
        "SGLANG_DISABLED_MODEL_ARCHS": other_models(),
    },
    "vllm": {"PYTHONPATH": CPU["vllm"], "HF_TOKEN": SECRET},
}
OF_RUNS = {kind: environment | {"LORAD_FORKS": "1"} for kind, environment in ENVIRONMENT.items()}
"""A server's processes are forks of its first one: 18 to 20 s of processor less."""
SHARED = {**OF_RUNS, "sglang": ENVIRONMENT["sglang"]}
"""For what most tests ask: SGLang's is spawned, as users have it, and its `launch.py` is imported by each of
its processes. What vLLM's processes import again is for a CPU alone.
"""


def setup_of(kind: str, *, max_rank: int = 16, context_length: int = 512) -> ServerSetup:
    """One server for adapters on every linear of builtin:tiny."""
    return ServerSetup(
        python=python_of(kind),
        env=SHARED[kind],
        max_rank=max_rank,
        targets=tuple(sorted({module.rpartition(".")[2] for module in SHAPES})),
        context_length=context_length,
        scaled_logprobs=True,
    )


@contextlib.asynccontextmanager
async def opened(
    kind: str, work: Path, model: Path = TINY, hosts: Sequence[Host] = (), **changes: Any
) -> AsyncIterator[RemoteEngine]:
    """An engine of a test's own. changes: of its setup."""
    engine_type = engine_class(kind)
    assert issubclass(engine_type, RemoteEngine)
    setup = msgspec.structs.replace(setup_of(kind), **changes)
    settings = settings_of(
        setup, model=model, dtype="float32", device="cpu", threads=1, memory_fraction=0.85, sleep=False
    )
    shapes = linear_shapes(read_config(model))
    engine = await engine_type.open(setup, settings, shapes, work=work, hosts=hosts)
    try:
        yield engine
    finally:
        await engine.close()


FITS = ("data.max_prompt_tokens=256", "rollout.temperature=0.9")
"""What the servers of all tests have room for; their log-probabilities are those of the temperature."""


def url_of(server: RemoteEngine) -> str:
    """Say in a spec that a run speaks with a server that is there: it starts none of its own."""
    return f"rollout.url={server._fleet.servers[0].http.address}"


async def busy(server: RemoteEngine, call: asyncio.Task[Any]) -> None:
    """Wait until a server works on `call`; `health` would ask the server, which may answer after the call has
    ended.
    """
    while not any(under_way.running for under_way in server._calls.values()):
        assert not call.done(), call.exception()
        await asyncio.sleep(0.001)
