"""The contract of one kind of server: how it is started and spoken to; all else is common to all kinds."""

import contextlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct

from lorad.engines.remote.http import Http, ServerGone, ServerSilent
from lorad.protocol.batch import Finish, Ranked, Sampling
from lorad.routes import RouteShape
from lorad.servers.kind import ServerKind

ANSWER_SECONDS = 10.0  # of routes that do no work


class ServerSettings(Struct, frozen=True, kw_only=True):
    """What a server is started with.

    model: a Hugging Face directory.
    device: `cpu` or `cuda:<n>`.
    devices: how many devices all servers have, from `device` on.
    visible: the names of this server's devices, on another machine.
    context_length: tokens of prompt and completion.
    max_rank: the highest rank of an adapter that will ever be loaded.
    targets: what adapters will ever adapt: leaf names of linears, such as `q_proj`, and `experts`.
    slots: distinct versions in one batch, the base not counted.
    max_versions: versions loaded at once.
    memory_fraction: the share of the device's memory for weights and cache together.
    scaled_logprobs: whether log-probabilities are under the temperature-scaled distribution (needed when a
        temperature is neither 0 nor 1).
    sleep: start so that `sleep` frees memory.
    engine_args: the user's own flags, by their name without leading dashes. `true` is a flag without a value,
        `false` or null removes a flag of lorad's.
    routes: the shape of the base's routes, where the server is to say the routes of tokens.
    """

    model: Path
    dtype: str
    device: str
    context_length: int
    max_rank: int
    targets: tuple[str, ...]
    slots: int
    max_versions: int
    memory_fraction: float
    threads: int = 1
    tp: int = 1
    devices: int = 1
    visible: tuple[str, ...] = ()
    max_running: int = 64
    scaled_logprobs: bool = False
    sleep: bool = False
    engine_args: Mapping[str, Any] = {}
    routes: RouteShape | None = None


def command_line(flags: Mapping[str, Any], *, negates: bool) -> Iterator[str]:
    """Yield the words of flags without those that are null, or false where no `--no-` negates them."""
    for name, value in flags.items():
        if value is None or (value is False and not negates):
            continue
        yield f"--no-{name}" if value is False else f"--{name}"
        if isinstance(value, list | tuple):
            yield from map(str, value)
        elif isinstance(value, Mapping):
            yield json.dumps(value)
        elif not isinstance(value, bool):
            yield str(value)


def common_environment(settings: ServerSettings) -> dict[str, str]:
    """Return the variables of every server, without cuDNN's attention (see lorad/models/ops.py)."""
    common = {
        "HF_HUB_OFFLINE": "1",  # a path that does not exist is asked of the hub
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.device == "cpu":
        return common
    return common | {
        "CUDA_VISIBLE_DEVICES": visible_devices(settings),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }


def visible_devices(settings: ServerSettings) -> str:
    """List the `tp` devices of a server, from the settings' device on, as this process sees devices."""
    if settings.visible:
        return ",".join(settings.visible)
    first = int(settings.device.partition(":")[2] or 0)
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    indices = range(first, first + settings.tp)
    return ",".join(seen[index] if index < len(seen) else str(index) for index in indices)


class Abilities(Struct, frozen=True):
    """What a running server says that it can do.

    max_tokens: its context length.
    lora: whether adapters can be loaded while it runs.
    sleep: whether it answers to sleep and wake.
    scaled_logprobs: as in ServerSettings; None where each request has what it needs.
    formats: whether it can follow a JSON schema.
    missing: what it lacks, each with what the lack costs.
    """

    version: str
    max_tokens: int
    lora: bool
    sleep: bool
    scaled_logprobs: bool | None = None
    formats: bool = False
    missing: tuple[str, ...] = ()


class SamplePiece(Struct, frozen=True):
    """New tokens of one sample, each with its finite log-probability.

    finish: why the sample ended, in its last piece.
    routes: in the last piece, where `Sampling.routes` asks for them, the experts of all tokens but the last
        one, prompt included, as one flat array.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None = None
    routes: np.ndarray | None = None


class Metrics(Struct, frozen=True):
    """Counters since the server's start, and gauges of now. None: the server does not report it."""

    running: int | None = None
    waiting: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of prompt_tokens, taken from the prefix cache
    cache_used: float | None = None  # share of the memory for keys and values
    slots_used: int | None = None
    slots: int | None = None


def summed(text: str) -> dict[str, float]:
    """Return the values in Prometheus' text format by name, added up over their labels."""
    totals: dict[str, float] = {}
    for name, value in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", text, re.MULTILINE):
        with contextlib.suppress(ValueError):  # it is no line of metrics
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


class Dialect(ABC):
    """One kind of server. Methods raise what `Http` raises: ServerGone, ServerRefused, ServerSilent.

    A version is named by what it was loaded as; None is the base.
    """

    kind: ClassVar[ServerKind]
    ready_route: ClassVar[str]  # does no work, and answers 200 when the server takes requests
    reserved: ClassVar[frozenset[str]]  # flags that only lorad sets, without dashes in front

    @abstractmethod
    def command(self, python: str, settings: ServerSettings, socket: Path) -> list[str]:
        """Return the argv that serves on the Unix socket `socket` and nowhere else. No secret is in it."""

    @abstractmethod
    def environment(self, settings: ServerSettings) -> dict[str, str]:
        """Return the variables to add to the server's environment."""

    @abstractmethod
    def check(self, sampling: Sampling, settings: ServerSettings) -> str:
        """Return why the server cannot sample like this, and what to do about it; "" when it can."""

    async def is_ready(self, http: Http) -> bool:
        """Return whether a starting server takes requests now."""
        with contextlib.suppress(ServerGone, ServerSilent):
            return await http.status(self.ready_route, timeout=ANSWER_SECONDS) == 200
        return False

    async def is_alive(self, http: Http) -> bool:
        """Return whether it answers at all: also while it is paused, asleep or busy."""
        return await self.is_ready(http)

    @abstractmethod
    async def abilities(self, http: Http) -> Abilities: ...

    @abstractmethod
    async def load(self, http: Http, name: str, directory: Path) -> None:
        """Load a PEFT directory under a name that was never used. ServerRefused has the server's words."""

    @abstractmethod
    async def unload(self, http: Http, name: str) -> None:
        """Forget it. The caller has no request on it in flight."""

    async def loaded(self, http: Http) -> dict[str, str]:
        """Return the path of every adapter that the server says it holds, by name and without the base."""
        models = await http.get("/v1/models", timeout=ANSWER_SECONDS)
        return {card["id"]: card["root"] for card in models["data"] if card.get("parent")}

    @abstractmethod
    def sample(
        self,
        http: Http,
        request: str,
        version: str | None,
        prompt: Sequence[int],
        seed: int,
        sampling: Sampling,
    ) -> AsyncIterator[SamplePiece]:
        """Yield the pieces of one sample as they come with `sampling.stream`, else as one piece.

        request: a name for `abort` that no other sample has.
        seed: decides the sample, below 2**64.

        Stop tokens are part of the sample. Nothing but `sampling` ends it, so not the model's own end token.
        """

    @abstractmethod
    async def abort(self, http: Http, requests: Sequence[str]) -> None:
        """End samples early; they end with finish "abort". Unknown names are ignored."""

    @abstractmethod
    async def score(
        self, http: Http, request: str, version: str | None, prompt: Sequence[int], completion: Sequence[int]
    ) -> np.ndarray:
        """Return log-probabilities of the completion at temperature 1, float32; NaN where none is said."""

    async def routed_score(
        self, http: Http, request: str, version: str | None, prompt: Sequence[int], completion: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what `score` returns, and the experts of all tokens but the last one as one flat array.

        Only a server that was started to say routes can do this.
        """
        raise NotImplementedError(f"{self.kind.name} says no routes")

    @abstractmethod
    async def ranked(
        self, http: Http, request: str, version: str | None, text: Sequence[int], start: int, most: int
    ) -> Ranked:
        """Return log-probabilities of a text from `start` on, and of the `most` likeliest in each place."""

    @abstractmethod
    async def flush(self, http: Http) -> bool:
        """Empty the prefix cache; False when the server would not (something is in flight)."""

    @abstractmethod
    async def sleep(self, http: Http) -> None:
        """Give device memory back. The caller has nothing in flight: some servers die of it."""

    @abstractmethod
    async def wake(self, http: Http) -> None: ...

    @abstractmethod
    async def metrics(self, http: Http) -> Metrics: ...
