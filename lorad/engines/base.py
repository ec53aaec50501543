"""The engine protocol: what a rollout engine does for a pool, whatever serves behind it.

An engine knows token ids only. It serves the base model and any number of *versions*: immutable adapters
under names that are never reused (`sorter@12`). Rules that every engine keeps, checked by
`tests/conformance/engine_suite.py`:

- A load that fails raises and changes nothing: what was served before is served as before.
- A sample is made by one version from its first token to its last, and each chunk names that version.
- A request for a version that is not loaded raises NotFound; it is never served by the base.
- `unload` returns when requests in flight have ended, and the version is gone and cannot come back by itself.
- Base log-probabilities are the same before and after any load, unload, sleep and wake.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import numpy as np
from msgspec import Struct

from lorad.adapters.adapter import Adapter
from lorad.errors import SpecError
from lorad.protocol.batch import Batch, Chunk, Prompt, Ranked, Sampling
from lorad.protocol.status import EngineStatus
from lorad.routes import Routes, RouteShape

BASE = "base"  # the name of the base model, wherever a version is named
Scorer = Callable[[str, Batch], Awaitable[np.ndarray]]
"""As `Engine.score`."""


class EngineCapabilities(Struct, frozen=True):
    """The abilities of an engine; a pool asks for nothing else."""

    dtype: str  # of the arithmetic: float32 or bfloat16
    max_rank: int
    max_versions: int  # loaded at once
    max_tokens: int  # prompt and completion together
    memory_source: bool  # `load` takes an Adapter, not only a directory
    sleep: bool
    bit_stable: bool  # the same call gives the same bits
    ranks: bool = False  # it has `ranked`
    formats: bool = False  # it takes `Sampling.schema`
    routes: RouteShape | None = None  # of the base, where it takes `Sampling.routes`


class AdapterSource(Struct, frozen=True):
    """Where a version comes from: exactly one of `adapter` and `directory`. `digest`: see Adapter.digest."""

    digest: str
    adapter: Adapter | None = None
    directory: Path | None = None


class LoadedVersion(Struct, frozen=True):
    """A version that the engine holds.

    digest: the digest of what the engine received, not copied from the caller.
    delivered: the sha256 of the file that servers read it from, its engine form (`lorad/adapters/served.py`);
        "" where it is served from memory.
    """

    name: str
    digest: str
    bytes: int
    in_flight: int
    delivered: str = ""


class Scored(Struct, frozen=True):
    """An engine's answer about a batch.

    logprobs: what `Engine.score` returns.
    routes: where the engine sent the tokens; None where it does not say.
    """

    logprobs: np.ndarray
    routes: Routes | None = None


class EngineHealth(EngineStatus, frozen=True, kw_only=True):
    """The state of an engine, and how many tokens a second it sampled lately."""

    tokens_per_second: float


class Engine(ABC):
    """One rollout engine. All methods belong to one asyncio loop; long work must not block it."""

    @abstractmethod
    def capabilities(self) -> EngineCapabilities: ...

    def software(self) -> dict[str, str]:
        """Return name and version of what serves, beside lorad and torch."""
        return {}

    @abstractmethod
    async def load(self, name: str, source: AdapterSource) -> LoadedVersion:
        """Load a version under a new name.

        Raises Conflict when the name was ever used before, AdapterRefused when the adapter does not fit
        (shapes, rank, targets, NaN) or its bytes are not those of `source.digest`.
        """

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Wait for requests in flight on it, then forget it for good. Raises NotFound."""

    @abstractmethod
    async def loaded(self) -> Sequence[LoadedVersion]:
        """List the versions that the engine itself reports as loaded, without the base."""

    @abstractmethod
    def generate(
        self, request: str, version: str, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Chunk]:
        """Sample from `version` (or BASE): chunks in any order over samples, in order within one.

        `request` names the call for `abort`. Raises NotFound (not loaded) before the first chunk, ValueError
        when a prompt with max_new_tokens exceeds max_tokens.
        """

    @abstractmethod
    async def score(self, version: str, batch: Batch) -> np.ndarray:
        """Return the log-probability of each completion token at temperature 1, float32 [T]."""

    async def scores(self, version: str, batch: Batch) -> Sequence[np.ndarray]:
        """Return what `score` gives on each server that serves now; there is at least one."""
        return [await self.score(version, batch)]

    async def routed_scores(self, version: str, batch: Batch) -> Sequence[Scored]:
        """Return `scores` with the routes of the batch's tokens, which need the capability."""
        return [Scored(logprobs) for logprobs in await self.scores(version, batch)]

    async def ranked(
        self, version: str, texts: Sequence[np.ndarray], starts: Sequence[int], most: int
    ) -> Ranked:
        """Return log-probabilities of the tokens of each text from its start on, and of the `most` likeliest
        in each place.

        texts: int32 [t].
        starts: at least 1.

        Raises NotFound, ValueError for tokens that the model does not have, SpecError without the capability.
        """
        raise SpecError(
            "this engine gives no log-probabilities of texts", hint="Leave echo and logprobs out."
        )

    def settled(self) -> AbstractAsyncContextManager[None]:
        """Let no part of the engine return (see `on_return`) inside the block, so that `scores` covers all
        that serve.

        It surrounds a load and its attestation. When the last part is gone, calls inside raise EngineGone at
        once.
        """
        return nullcontext()

    def on_return(self, check: Callable[[Scorer], Awaitable[None]]) -> None:  # noqa: B027 (most engines lose nothing)
        """Await `check` whenever a part of the engine has restarted or woken, and has loaded its versions
        again.

        `check` gets a scorer of that part alone, which serves nobody before `check` returns. When it raises,
        that part is never served from again, and calls that have nobody else to serve them raise the same.
        """

    @abstractmethod
    async def abort(self, request: str) -> None:
        """End a generate call early, if it is known: its unfinished samples end with finish "abort"."""

    @abstractmethod
    async def drain(self) -> None:
        """Return when nothing is in flight."""

    @abstractmethod
    async def sleep(self) -> None:
        """Give device memory back; drained first. Raises Conflict without the capability."""

    @abstractmethod
    async def wake(self) -> None:
        """Serve again, with every version that was loaded."""

    @abstractmethod
    async def health(self) -> EngineHealth: ...

    def stop_waiting(self) -> None:  # noqa: B027 (most engines never wait for a part of theirs)
        """Make whatever waits for a part of the engine to return fail, because the pool is about to end."""

    @abstractmethod
    async def close(self) -> None:
        """Abort everything and free everything."""


def check_texts(texts: Sequence[np.ndarray], starts: Sequence[int], vocab_size: int, most: int) -> None:
    """Raise ValueError for texts that cannot be ranked; a text has at most `most` tokens."""
    for text, start in zip(texts, starts, strict=True):
        if not 0 < text.size <= most or text.min() < 0 or text.max() >= vocab_size:
            raise ValueError(f"a text has 1 to {most} tokens with ids inside 0..{vocab_size - 1}")
        if not 1 <= start <= text.size:
            raise ValueError(f"a text of {text.size} tokens has no token {start} that others come before")


def check_request(prompts: Sequence[Prompt], sampling: Sampling, vocab_size: int, most: int) -> None:
    """Raise ValueError for a request that cannot be sampled: `most` tokens fit, prompt and completion."""
    if sampling.max_new_tokens < 1 or not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"max_new_tokens >= 1, temperature >= 0 and 0 < top_p <= 1 are needed, not {sampling}"
        )
    if "" in sampling.stop:
        raise ValueError("an empty stop string would end every sample at once")
    for prompt in prompts:
        size = len(prompt.tokens)
        if not size or prompt.tokens.min() < 0 or prompt.tokens.max() >= vocab_size:
            raise ValueError(f"prompt {prompt.id} is empty or has token ids outside 0..{vocab_size - 1}")
        if size + sampling.max_new_tokens > most:
            raise ValueError(
                f"prompt {prompt.id}: {size} tokens and max_new_tokens {sampling.max_new_tokens} exceed "
                f"{most}, the positions of the engine"
            )


def routes_of(batch: Batch, samples: Sequence[np.ndarray]) -> Routes | None:
    """Return the routes of a batch, or None without samples. A prompt has the routes of its first sample.

    samples: the routes of each sample: its prompt's tokens, then its own.
    """
    if not samples:
        return None
    first = 0
    prompts: list[np.ndarray] = []
    for size, count in zip(batch.prompt_lengths.tolist(), batch.group_sizes.tolist(), strict=True):
        prompts += [samples[first][:size]] * (count > 0)
        first += count
    lengths = batch.completion_lengths.tolist()
    completions = [routes[-size:] for routes, size in zip(samples, lengths, strict=True)]
    return Routes(np.concatenate(prompts), np.concatenate(completions))
