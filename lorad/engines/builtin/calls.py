"""What is being generated: calls, the samples they wait for, and when a sample ends."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec import Struct

from lorad.engines.versions import Held
from lorad.models.lora import FrozenLora
from lorad.models.turns import POOL, Caller
from lorad.protocol.batch import Chunk, Finish, Prompt, Sampling
from lorad.routes import unknown_like

# how often growing samples of a call that streams are reported; its ended ones are at once
_STREAM_SECONDS = 0.05
SHARED = 256  # tokens of a prompt from which on its samples share its keys and values
GATHER_SECONDS = 1.0  # how often those of another call are


@dataclass(eq=False)
class HeldLora(Held):
    """A version that the builtin engine holds: its frozen copy on the device. `lora` is None for the base."""

    lora: FrozenLora | None = None

    def __post_init__(self) -> None:
        self.bytes = self.lora.nbytes() if self.lora else 0

    @property
    def identity(self) -> str:
        """Equal for versions that compute the same: the digest is of the tensors alone."""
        return f"{self.digest} x {self.lora.scale if self.lora else 0}"


class Decoder(Protocol):
    """Token ids -> text; what stop strings need of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class _StopStrings:
    """Looks for stop strings at the end of a growing sample.

    A token is at least one byte, so a window suffices.
    """

    def __init__(self, stops: Sequence[str], decoder: Decoder) -> None:
        self.stops = tuple(stops)
        self.decoder = decoder
        # a character may begin up to 3 bytes earlier
        self.window = max(len(stop.encode()) for stop in stops) + 4

    def complete(self, tokens: list[int]) -> bool:
        """Return whether the last token completes a stop string."""
        text = self.decoder.decode(tokens[-self.window :], skip_special_tokens=False)
        return any(stop in text for stop in self.stops)


class Sample(Struct, eq=False):
    """One completion as it grows. `chunk` hands out what is new since the last time.

    Attributes:
        routes: The routes of the tokens that were fed, where they are asked for. The first sample of a prompt
            has the routes of the prompt's tokens before them.
    """

    prompt: str
    index: int
    version: str
    seed: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stops: _StopStrings | None
    tokens: list[int] = []
    logprobs: list[float] = []
    finish: Finish | None = None
    sent: int = 0
    closed: bool = False
    number: int = 0  # from 1, in order of first admission
    routes: list[np.ndarray] = []

    @property
    def is_spoilt(self) -> bool:
        """Return whether its arithmetic ran over: its keys and values are not to be met by others."""
        return bool(self.logprobs) and not math.isfinite(self.logprobs[-1])

    def push(self, token: int, logprob: float) -> bool:
        """Take the next token; False when it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids or (self.stops is not None and self.stops.complete(self.tokens)):
            self.finish = "stop"
        elif len(self.tokens) >= self.sampling.max_new_tokens:
            self.finish = "length"
        return self.finish is None

    def prefilled(self, routes: np.ndarray, prompt: int) -> None:
        """Take the routes of all tokens until now, of which so many are the prompt's, as far as they are not
        known.
        """
        covered = sum(map(len, self.routes)) + (prompt if self.index else 0)
        self.routes.append(routes[covered:])

    def chunk(self) -> Chunk | None:
        """Return the tokens not handed out yet, or None when there is nothing to say."""
        if self.closed or (self.finish is None and self.sent == len(self.tokens)):
            return None
        start = self.sent
        self.sent = len(self.tokens)
        self.closed = self.finish is not None
        routes = None
        if self.closed and self.routes:
            routes = np.concatenate([*self.routes, unknown_like(self.routes[0], 1)])
        return Chunk(
            prompt=self.prompt,
            index=self.index,
            version=self.version,
            tokens=np.array(self.tokens[start:], np.int32),
            logprobs=np.array(self.logprobs[start:], np.float32),
            finish=self.finish,
            routes=routes,
        )


@dataclass(slots=True, eq=False)
class SampleGroup:
    """Samples that continue from the same tokens, prefilled once.

    A group has the samples of one prompt, or a single sample that lost its place.
    """

    tokens: np.ndarray
    samples: list[Sample]
    call: "Call"
    prompt: int  # so many of the tokens are the prompt

    @property
    def shares(self) -> bool:
        """Return whether the keys and values of the prompt are worth keeping once for its samples."""
        return len(self.samples) > 1 and self.prompt >= SHARED

    @property
    def key(self) -> tuple[HeldLora, bytes]:
        """Equal where the keys and values of the prompt are."""
        return self.call.held, self.tokens[: self.prompt].tobytes()

    def split(self, count: int) -> "tuple[SampleGroup, SampleGroup]":
        """Split off the first samples; returns them and the others."""
        first = SampleGroup(self.tokens, self.samples[:count], self.call, self.prompt)
        rest = SampleGroup(self.tokens, self.samples[count:], self.call, self.prompt)
        return first, rest

    def resumed(self, sample: Sample) -> "SampleGroup":
        """Make the group that recomputes the keys and values of a sample that gave up its row."""
        completion = np.array(sample.tokens, self.tokens.dtype)
        return SampleGroup(
            np.concatenate([self.tokens[: self.prompt], completion]), [sample], self.call, self.prompt
        )


class Call:
    """One `generate` call. The compute thread grows its samples; its queue carries lists of chunks, then
    None.

    caller: whose call it is; it collects the time in which none of the samples has a turn.
    """

    def __init__(
        self,
        request: str,
        version: HeldLora,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        decoder: Decoder | None,
        caller: Caller = POOL,
    ) -> None:
        self.request = request
        self.held = version
        self.caller = caller
        self.sampling = sampling
        self.aborted = False
        self.queue: asyncio.Queue[list[Chunk] | Exception | None] = asyncio.Queue()
        stop_ids = frozenset(sampling.stop_token_ids)
        stops = _StopStrings(sampling.stop, decoder) if sampling.stop and decoder is not None else None
        self.groups = [
            SampleGroup(
                prompt.tokens,
                [
                    Sample(prompt.id, index, version.name, seed, sampling, stop_ids, stops)
                    for index, seed in enumerate(prompt.seeds.tolist())
                ],
                self,
                len(prompt.tokens),
            )
            for prompt in prompts
            if prompt.seeds.size
        ]
        self.samples = [sample for group in self.groups for sample in group.samples]
        self.open = self.samples
        self.stream = sampling.stream
        self.counted = 0
        self.as_they_end = sampling.stream or sampling.as_they_end
        self.reported = 0.0 if self.stream else time.monotonic()

    @property
    def goes_first(self) -> bool:
        return self.caller.party.goes_first

    @property
    def most_tokens(self) -> int:
        """Keys and values that all its samples can need at once, in a batch of their own."""
        shared = [group.prompt for group in self.groups if group.shares]
        own = max((group.prompt for group in self.groups if not group.shares), default=0)
        own += self.sampling.max_new_tokens
        return len(self.samples) * own + len(shared) * max(shared, default=0)

    def report(self, now: float) -> list[Chunk] | None:
        """Return the chunks since the last report; None when there is nothing to send yet. now:
        time.monotonic().
        """
        ended = [sample for sample in self.open if sample.finish is not None]
        due = now - self.reported >= (_STREAM_SECONDS if self.stream else GATHER_SECONDS)
        if not due and len(ended) < len(self.open) and not (self.as_they_end and ended):
            return None
        self.reported = now if due else self.reported
        ready = self.open if due else ended
        chunks = [chunk for sample in ready if (chunk := sample.chunk()) is not None]
        self.open = [sample for sample in self.open if not sample.closed]
        return chunks

    def more(self) -> int:
        """Count the tokens made since the last call."""
        before = self.counted
        self.counted = sum(len(sample.tokens) for sample in self.samples)
        return self.counted - before

    @property
    def ended(self) -> bool:
        """Return whether everything was handed out."""
        return not self.open


Report = tuple[Call, list[Chunk], bool]
"""A call, new chunks of it, and whether these are the last."""
