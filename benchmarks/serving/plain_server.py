"""A real SGLang or vLLM without LoRA whose weights are replaced as a whole: the server of TRL's way."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from lorad.backends.registry import engine_class
from lorad.children.process import Child
from lorad.engines.remote.dialect import Dialect, SamplePiece
from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.remote.http import Address, Http
from lorad.engines.remote.settings import settings_of
from lorad.protocol.batch import Sampling
from tests.engines.real.places import setup_of

UPDATE_SECONDS = 120.0
POLL_SECONDS = 0.25
# Flags of adapters, each left out.
LORA_FLAGS = {
    "sglang": (
        "enable-lora",
        "max-lora-rank",
        "lora-target-modules",
        "max-loras-per-batch",
        "max-loaded-loras",
    ),
    "vllm": ("enable-lora", "max-lora-rank", "lora-target-modules", "max-loras", "max-cpu-loras"),
}


@dataclass(frozen=True)
class PlainServer:
    dialect: Dialect
    http: Http

    async def update(self, directory: Path) -> None:
        """Take every weight from a Hugging Face directory, and forget what was computed with those before."""
        if self.dialect.kind.name == "sglang":
            await self.http.post(
                "/update_weights_from_disk", {"model_path": str(directory)}, timeout=UPDATE_SECONDS
            )
            return
        order = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self.http.post("/collective_rpc", order, timeout=UPDATE_SECONDS)
        await self.dialect.flush(self.http)

    async def first_token(self, prompt: np.ndarray, seed: int) -> None:
        sampling = Sampling(max_new_tokens=1)
        pieces = self.dialect.sample(self.http, f"first {seed}.", None, prompt.tolist(), seed, sampling)
        async with aclosing(cast("AsyncGenerator[SamplePiece, None]", pieces)) as came:
            assert [piece async for piece in came]

    async def score(self, prompt: np.ndarray, completion: np.ndarray) -> np.ndarray:
        """float32 [len(completion)]: log-probabilities."""
        return await self.dialect.score(self.http, "score.", None, prompt.tolist(), completion.tolist())


@asynccontextmanager
async def without_lora(kind: str, work: Path, model: Path, context_length: int) -> AsyncIterator[PlainServer]:
    engine_type = engine_class(kind)
    assert issubclass(engine_type, RemoteEngine)
    dialect = engine_type.dialect()
    left_out = dict.fromkeys(LORA_FLAGS[kind])
    setup = msgspec.structs.replace(setup_of(kind, context_length=context_length), engine_args=left_out)
    settings = settings_of(
        setup, model=model, dtype="float32", device="cpu", threads=1, memory_fraction=0.85, sleep=False
    )
    socket = work / "plain.sock"
    environment = {**dialect.environment(settings), "TMPDIR": str(work), **setup.env}
    argv = dialect.command(setup.python, settings, socket)
    process = Child(argv, environment, work / "plain.log", work / "plain.json", work)
    http = Http(Address(socket=socket))
    try:
        await process.start()
        while not await dialect.is_ready(http):
            if not process.is_alive:
                raise RuntimeError(f"the server {await process.ended()}:\n{process.output.tail(40)}")
            await asyncio.sleep(POLL_SECONDS)
        yield PlainServer(dialect, http)
    finally:
        await http.close()
        await process.stop()
