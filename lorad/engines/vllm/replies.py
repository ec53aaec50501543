"""Read and check the answers of a vLLM server."""

import asyncio
import contextlib
import heapq
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lorad.engines.remote.dialect import Metrics, SamplePiece, summed
from lorad.engines.remote.http import Http, NotFinite, ServerRefused
from lorad.errors import LoradError
from lorad.protocol.batch import FINISHES, Finish, Ranked

NOT_FINITE = "Out of range float"  # of JSON: what vLLM answers where a log-probability is NaN or infinite
NO_LOGPROBS = "vLLM sampled without a finite log-probability for every token"
_LEAST = -9999.0  # what vLLM says for minus infinity
_FINISHES: dict[str | None, Finish | None] = dict(zip(FINISHES, FINISHES, strict=True))
_TEXT_LIMIT = 500


class _LogprobsReply(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] = []


class _PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float | None = None


class _Choice(msgspec.Struct, frozen=True):
    """The words of vLLM about a sample; in a stream, `token_ids` has only the tokens that are new."""

    token_ids: list[int] | None = None
    logprobs: _LogprobsReply | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _CompletionReply(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class _Failure(msgspec.Struct, frozen=True):
    message: str = ""
    code: int = 500


def choice(data: Any, route: str) -> _Choice:
    """Check a reply. Raises ServerRefused for an error amid a stream, LoradError for another shape."""
    try:
        if isinstance(data, Mapping) and data.get("error"):
            failure = msgspec.convert(data["error"], _Failure)
            raise refused(route, failure.code, failure.message)
        return msgspec.convert(data, _CompletionReply).choices[0]
    except (msgspec.ValidationError, IndexError) as error:
        raise LoradError(f"vLLM answered {route} in a form that lorad does not know: {error}") from error


def piece(reply: _Choice) -> SamplePiece:
    tokens = reply.token_ids or []
    said = reply.logprobs.token_logprobs if reply.logprobs else []
    logprobs = [value for value in said if value is not None and math.isfinite(value) and value > _LEAST]
    if len(said) != len(tokens) or len(logprobs) != len(tokens):
        raise NotFinite(NO_LOGPROBS)
    if reply.finish_reason not in _FINISHES:
        raise LoradError(f"vLLM ended a sample for a reason that lorad does not know: {reply.finish_reason}")
    return SamplePiece(tokens, logprobs, _FINISHES[reply.finish_reason])


def scores(reply: _Choice, completion: Sequence[int]) -> np.ndarray:
    """Return log-probabilities of the completion, the prompt's end, as float32; NaN where vLLM says none."""
    said = (reply.prompt_logprobs or [])[-len(completion) :]
    if len(said) != len(completion):
        raise LoradError("vLLM scored fewer tokens than it was asked for")
    values = []
    for token, of_token in zip(completion, said, strict=True):
        value = (of_token or {}).get(str(token), _PromptLogprob()).logprob
        values.append(math.nan if value is None else value)
    return np.array(values, np.float32)


def ranked(reply: _Choice, completion: Sequence[int], most: int) -> Ranked:
    """Return what is said of the last tokens of the prompt."""
    said = (reply.prompt_logprobs or [])[-len(completion) :] if completion else []
    rows = [
        heapq.nlargest(most, ((entry.logprob or 0.0, int(token)) for token, entry in (place or {}).items()))
        for place in said
    ]
    if len(rows) != len(completion) or any(len(row) != most for row in rows):
        raise LoradError("vLLM gave fewer tokens in a place than it was asked for")
    return Ranked(
        scores(reply, completion) if completion else np.zeros(0, np.float32),
        np.array([[token for _, token in row] for row in rows], np.int32).reshape(len(rows), most),
        np.array([[value for value, _ in row] for row in rows], np.float32).reshape(len(rows), most),
    )


def refusal(error: ServerRefused, *private: object) -> ServerRefused:
    """Return the error in few words, without the other names that vLLM lists and without `private` ones."""
    route = error.message.partition(" ")[0]
    match = re.search(r'"(?:message|detail)"\s*:\s*("(?:[^"\\]|\\.)*")', error.text)
    return refused(
        route, error.code, str(json.loads(match.group(1), strict=False)) if match else error.text, *private
    )


def refused(route: str, code: int, message: str, *private: object) -> ServerRefused:
    text = message.partition(" Valid aliases")[0].partition("\n")[0]
    for word in private:
        text = text.replace(str(word), "the directory that it was given")
    text = text.strip()[:_TEXT_LIMIT]
    return ServerRefused(f"{route} answered {code}: {text}", status=code, text=text)


def metrics(text: str) -> Metrics:
    """Read metrics from Prometheus' text format."""
    sums = summed(text)

    def count(name: str) -> int | None:
        return int(sums[f"vllm:{name}"]) if f"vllm:{name}" in sums else None

    used = slots = None
    if adapters := re.findall(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", text, re.MULTILINE):
        # the newest line: its value is the time it was set
        labels, _ = max(adapters, key=lambda line: float(line[1]))
        fields = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        used = len([name for name in fields.get("running_lora_adapters", "").split(",") if name])
        slots = int(fields["max_lora"]) if fields.get("max_lora", "").isdigit() else None
    return Metrics(
        running=count("num_requests_running"),
        waiting=count("num_requests_waiting"),
        prompt_tokens=count("prompt_tokens_total"),
        cached_tokens=count("prefix_cache_hits_total"),
        cache_used=sums.get("vllm:kv_cache_usage_perc"),
        slots_used=used,
        slots=slots,
    )


class Events:
    """The events of one request, as an async context manager: at its end the connection is closed.

    vLLM ends a sample whose connection is closed.
    """

    def __init__(self, http: Http, path: str, body: dict[str, Any]) -> None:
        self.aborted = False  # set by a caller that ends it early
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._error: Exception | None = None
        self._reader = asyncio.create_task(self._read(http.events(path, body)))

    async def __aenter__(self) -> "Events":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield the events. Raises what the request raised, unless it was cut off."""
        while (event := await self._queue.get()) is not None:
            yield event
        if self._error is not None:
            raise self._error

    @property
    def is_over(self) -> bool:
        """Return whether the server has sent its last event."""
        return self._reader.done()

    async def over(self, seconds: float) -> None:
        """Wait for the last event, at most so many seconds."""
        await asyncio.wait([self._reader], timeout=seconds)

    def cut(self) -> None:
        """Close the connection; events that came can still be read."""
        self._reader.cancel()

    async def _read(self, stream: AsyncGenerator[Any, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for event in stream:
                    self._queue.put_nowait(event)
        except Exception as error:  # whatever it is, it is raised in the reader
            self._error = error
        finally:
            self._queue.put_nowait(None)
