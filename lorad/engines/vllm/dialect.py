"""How vLLM servers are started and spoken to. Checked against vLLM 0.32.0."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lorad.engines.remote.dialect import (
    ANSWER_SECONDS,
    Abilities,
    Metrics,
    SamplePiece,
    ServerSettings,
)
from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.remote.http import Http, NotFinite, ServerGone, ServerRefused
from lorad.engines.vllm import replies
from lorad.engines.vllm.command import BASE_NAME, CONTEXT_MARGIN, VllmCommand
from lorad.engines.vllm.memory import AdapterNumbers
from lorad.engines.vllm.replies import Events
from lorad.protocol.batch import Ranked, Sampling

_SAMPLE = "/v1/completions"
_ABORT_ROUTES = ("/abort_requests", "/inference/v1/abort_requests")
ABORT_EVERY = 0.1  # seconds
_ABORT_TRIES = 10  # then the connection is closed
_INFO_SECONDS = 60.0  # /server_info looks at the whole machine the first time
_LEAST_TEMPERATURE = 0.01  # vLLM raises what is below it


class VllmDialect(VllmCommand):
    ready_route = "/health"  # says 503 when the engine behind it died

    def __init__(self) -> None:
        self._running: dict[str, Events] = {}
        self._memory = AdapterNumbers()
        self._bases: dict[str, str] = {}  # what each server calls its base, by address

    def check(self, sampling: Sampling, settings: ServerSettings) -> str:
        temperature = sampling.temperature
        if "" in sampling.stop:
            return "vLLM takes no empty stop string: leave it out"
        if temperature == 0 or _is_greedy(sampling):
            return ""
        if not sampling.logprobs and temperature >= _LEAST_TEMPERATURE:
            return ""
        if temperature < _LEAST_TEMPERATURE:
            asked = f"where {temperature:g} is asked for"
            return f"vLLM samples at {_LEAST_TEMPERATURE:g} {asked}: use temperature 0"
        if not settings.scaled_logprobs and temperature != 1:
            return (
                f"this vLLM server gives log-probabilities at temperature 1, not at {temperature:g}: use "
                "temperature 1 or 0, or ask for this one in the run's rollout.temperature, which starts a "
                "server of its own"
            )
        if settings.scaled_logprobs and (sampling.top_p < 1 or sampling.top_k):
            return (
                "vLLM gives log-probabilities at a temperature other than 1 only after top_k and top_p, "
                "where they are of no use to train: leave top_k and top_p out, or use temperature 1 in the "
                "whole run, or take sglang or builtin"
            )
        return ""

    async def abilities(self, http: Http) -> Abilities:
        version = await http.get("/version", timeout=ANSWER_SECONDS)
        models = await http.get("/v1/models", timeout=ANSWER_SECONDS)
        base = next(card for card in models["data"] if not card.get("parent"))
        self._bases[str(http.address)] = base["id"]
        route = await http.status("/v1/load_lora_adapter", timeout=ANSWER_SECONDS) != 404
        info: dict[str, Any] = {}  # stays empty without VLLM_SERVER_DEV_MODE
        with contextlib.suppress(ServerRefused):
            reply = await http.get("/server_info?config_format=json", timeout=_INFO_SECONDS)
            info = dict(reply["vllm_config"])
        await self._memory.begin(http)
        lora = route and info.get("lora_config", True) is not None
        model = info.get("model_config", {})
        return Abilities(
            version=str(version["version"]),
            max_tokens=int(base["max_model_len"]) - CONTEXT_MARGIN,
            lora=lora,
            sleep=bool(info),
            formats=True,
            scaled_logprobs=str(model.get("logprobs_mode", "raw_logprobs")).startswith("processed"),
            missing=tuple(_missing(info, route)),
        )

    async def load(self, http: Http, name: str, directory: Path) -> None:
        body = {"lora_name": name, "lora_path": str(directory)}
        with _own_words(directory):
            await http.post("/v1/load_lora_adapter", body, admin=True)
        await self._memory.loaded(http, name)

    async def unload(self, http: Http, name: str) -> None:
        with _own_words():
            await http.post("/v1/unload_lora_adapter", {"lora_name": name}, admin=True)
        await self._memory.forget(http, name)

    async def sample(
        self,
        http: Http,
        request: str,
        version: str | None,
        prompt: Sequence[int],
        seed: int,
        sampling: Sampling,
    ) -> AsyncIterator[SamplePiece]:
        greedy = _is_greedy(sampling)
        # all parameters are said, so that no default of the server or of the model comes in
        body = self._body(http, request, version, prompt) | {
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": 0 if greedy else sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": seed & (2**63 - 1),
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": 0,  # of the sampled token alone
            "stream": sampling.stream,
            **({"structured_outputs": {"json": json.loads(sampling.schema)}} if sampling.schema else {}),
        }
        async with Events(http, _SAMPLE, body) as events:
            self._running[request] = events
            try:
                with _own_words():
                    async for event in events:
                        piece = replies.piece(replies.choice(event, _SAMPLE))
                        if piece.tokens or piece.finish:
                            yield piece
                        if piece.finish:
                            return
            except ServerRefused as error:
                if replies.NOT_FINITE in error.text:
                    raise NotFinite(replies.NO_LOGPROBS) from None
                raise
            finally:
                del self._running[request]
        if not events.aborted:
            raise ServerGone(f"{_SAMPLE}: the stream broke off")
        yield SamplePiece([], [], "abort")

    async def abort(self, http: Http, requests: Sequence[str]) -> None:
        # Asked again until they end: vLLM ignores an abort that overtakes its request.
        left = {request: self._running[request] for request in requests if request in self._running}
        for events in left.values():
            events.aborted = True
        for _ in range(_ABORT_TRIES):
            if not left or not await _tell_to_abort(http, list(left)):
                break
            await asyncio.gather(*(events.over(ABORT_EVERY) for events in left.values()))
            left = {request: events for request, events in left.items() if not events.is_over}
        for events in left.values():
            events.cut()

    def _body(self, http: Http, request: str, version: str | None, prompt: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self._bases.get(str(http.address), BASE_NAME) if version is None else version,
            "request_id": request,
            "prompt": list(prompt),
            "add_special_tokens": False,
            "stream": False,
        }

    async def score(
        self, http: Http, request: str, version: str | None, prompt: Sequence[int], completion: Sequence[int]
    ) -> np.ndarray:
        limits = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        body = self._body(http, request, version, [*prompt, *completion]) | limits
        try:
            with _own_words():
                return replies.scores(replies.choice(await http.post(_SAMPLE, body), _SAMPLE), completion)
        except ServerRefused as error:
            if replies.NOT_FINITE not in error.text:
                raise
            return np.full(len(completion), np.nan, np.float32)

    async def ranked(
        self, http: Http, request: str, version: str | None, text: Sequence[int], start: int, most: int
    ) -> Ranked:
        limits = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": most}
        body = self._body(http, request, version, text) | limits
        with _own_words():
            reply = replies.choice(await http.post(_SAMPLE, body), _SAMPLE)
        return replies.ranked(reply, text[start:], most)

    async def flush(self, http: Http) -> bool:
        reply = await http.post("/reset_prefix_cache", admin=True)
        return bool(reply["success"])

    async def sleep(self, http: Http) -> None:
        with _own_words():
            await http.post("/sleep?level=1&mode=wait", admin=True)

    async def wake(self, http: Http) -> None:
        with _own_words():
            await http.post("/wake_up", admin=True)

    async def metrics(self, http: Http) -> Metrics:
        try:
            text = await http.get("/metrics", timeout=ANSWER_SECONDS)
        except ServerRefused:
            return Metrics()
        return replies.metrics(str(text))


def _is_greedy(sampling: Sampling) -> bool:
    """Return whether nothing is drawn and vLLM gives log-probabilities at temperature 1."""
    return sampling.temperature == 0 or (sampling.temperature == 1 and sampling.top_k == 1)


@contextlib.contextmanager
def _own_words(*private: object) -> Iterator[None]:
    try:
        yield
    except ServerRefused as error:
        raise replies.refusal(error, *private) from None


async def _tell_to_abort(http: Http, requests: list[str]) -> bool:
    """Return False when the server has no route for it."""
    body = {"request_ids": [f"cmpl-{request}-0" for request in requests]}
    for route in _ABORT_ROUTES:
        with contextlib.suppress(ServerRefused):
            await http.post(route, body, timeout=ANSWER_SECONDS, admin=True)
            return True
    return False


def _missing(info: dict[str, Any], route: bool) -> Iterator[str]:
    if not route:
        yield "no VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment: no adapter can be loaded"
    if not info:
        yield (
            "no VLLM_SERVER_DEV_MODE=1 in its environment: it cannot sleep, and keeps adapters that were "
            "unloaded"
        )
        return
    if info.get("lora_config") is None:
        yield "no --enable-lora: only the base can be served"
    if not info["model_config"].get("enable_sleep_mode"):
        yield "no --enable-sleep-mode: sleep gives no memory back"
    if info["model_config"].get("logprobs_mode") != "processed_logprobs":
        yield (
            "no --logprobs-mode processed_logprobs: log-probabilities are right at temperature 1 and 0 alone"
        )


class VllmEngine(RemoteEngine):
    """One or several vLLM servers."""

    dialect = VllmDialect
