"""How SGLang servers are started and spoken to. Checked against SGLang 0.5.23."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lorad.engines.remote.dialect import (
    ANSWER_SECONDS,
    Abilities,
    Metrics,
    SamplePiece,
    ServerSettings,
    summed,
)
from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.remote.http import Http, ServerGone, ServerRefused, ServerSilent
from lorad.engines.sglang import replies
from lorad.engines.sglang.command import CONTEXT_MARGIN, SglangCommand
from lorad.engines.sglang.launch import NOWHERE
from lorad.errors import LoradError
from lorad.protocol.batch import Finish, Ranked, Sampling

_ABORT_EVERY = 0.1  # seconds
_ABORT_TRIES = 20
_GREEDY_TOP_P = 1e-9  # leaves the most likely token alone
_MAX_STOP_STRINGS = 32


class SglangDialect(SglangCommand):
    ready_route = "/ready"  # not /health: it samples a token, which a paused server never does

    def __init__(self) -> None:
        # request -> SGLang's id of what is in flight for it, which is always new: SGLang aborts every request
        # whose id begins with the one to abort, and that id once more two seconds after the end of a stream
        self._running: dict[str, str] = {}
        self._aborted: set[str] = set()

    def check(self, sampling: Sampling, settings: ServerSettings) -> str:
        if len(sampling.stop) > _MAX_STOP_STRINGS:
            return (
                f"SGLang takes at most {_MAX_STOP_STRINGS} stop strings, not {len(sampling.stop)}: leave "
                "some out"
            )
        if "" in sampling.stop:
            return "an empty stop string ends every sample of SGLang at once: leave it out"
        if sampling.top_p <= 0:
            return (
                f"SGLang wants top_p above 0, not {sampling.top_p:g}: use temperature 0 for the most "
                "likely token"
            )
        return ""

    async def is_alive(self, http: Http) -> bool:
        with contextlib.suppress(ServerGone, ServerSilent):
            return await http.status(self.ready_route, timeout=ANSWER_SECONDS) < 600
        return False

    async def abilities(self, http: Http) -> Abilities:
        info = await http.get("/server_info", timeout=ANSWER_SECONDS)
        models = await http.get("/v1/models", timeout=ANSWER_SECONDS)
        context = next(card["max_model_len"] for card in models["data"] if not card.get("parent"))
        return Abilities(
            version=str(info["version"]),
            max_tokens=int(context) - CONTEXT_MARGIN,
            lora=bool(info.get("enable_lora")) and info.get("dp_size", 1) == 1,
            sleep=True,
            formats=info.get("grammar_backend") not in (None, "none"),
            missing=tuple(_missing(info)),
        )

    async def load(self, http: Http, name: str, directory: Path) -> None:
        with _own_words():
            body = {"lora_name": name, "lora_path": str(directory)}
            await http.post("/load_lora_adapter", body, admin=True)

    async def unload(self, http: Http, name: str) -> None:
        with _own_words():
            await http.post("/unload_lora_adapter", {"lora_name": name}, admin=True)

    async def sample(
        self,
        http: Http,
        request: str,
        version: str | None,
        prompt: Sequence[int],
        seed: int,
        sampling: Sampling,
    ) -> AsyncIterator[SamplePiece]:
        tokens = list(prompt)
        end = len(prompt) + sampling.max_new_tokens
        finish: Finish | None = None
        try:
            while finish is None:
                self._running[request] = uuid.uuid4().hex
                body = {
                    "rid": self._running[request],
                    "input_ids": tokens,
                    "lora_path": version,
                    "sampling_params": _parameters(sampling, seed, end - len(tokens)),
                    "return_logprob": True,
                    "stream": sampling.stream,
                    **({"return_routed_experts": True} if sampling.routes else {}),
                }
                async with contextlib.aclosing(_pieces(http, body, sampling)) as pieces:
                    async for piece, over in pieces:
                        tokens += piece.tokens
                        finish = piece.finish
                        if finish is None and over:  # at the model's own end token: it continues, if it may
                            finish = "abort" if request in self._aborted else None
                            finish = "length" if len(tokens) >= end else finish
                        if piece.tokens or finish:
                            routes = piece.routes if finish else None
                            yield SamplePiece(piece.tokens, piece.logprobs, finish, routes)
        finally:
            self._running.pop(request, None)
            self._aborted.discard(request)

    async def abort(self, http: Http, requests: Sequence[str]) -> None:
        # Asked again until they end: SGLang forgets an abort that overtakes its request.
        for _ in range(_ABORT_TRIES):
            rids = [self._running[request] for request in requests if request in self._running]
            if not rids:
                return
            self._aborted.update(request for request in requests if request in self._running)
            await asyncio.gather(*(http.post("/abort_request", {"rid": rid}, admin=True) for rid in rids))
            await asyncio.sleep(_ABORT_EVERY)

    async def score(
        self, http: Http, request: str, version: str | None, prompt: Sequence[int], completion: Sequence[int]
    ) -> np.ndarray:
        reply = await _read(http, version, [*prompt, *completion], len(prompt))
        return replies.scores(reply, completion)

    async def routed_score(
        self, http: Http, request: str, version: str | None, prompt: Sequence[int], completion: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        text = [*prompt, *completion]
        reply = await _read(http, version, text, len(prompt), return_routed_experts=True)
        routes = replies.routes(reply)
        if routes is None:
            raise LoradError("the server says no routes, which it was started for")
        return replies.scores(reply, completion), routes

    async def ranked(
        self, http: Http, request: str, version: str | None, text: Sequence[int], start: int, most: int
    ) -> Ranked:
        reply = await _read(http, version, text, start, top_logprobs_num=most)
        return replies.ranked(reply, text[start:], most)

    async def flush(self, http: Http) -> bool:
        try:
            await http.post("/flush_cache", admin=True)
        except ServerRefused as error:
            if error.code != 400:
                raise
            return False
        return True

    async def sleep(self, http: Http) -> None:
        with _own_words():
            await http.post("/release_memory_occupation", {}, admin=True)

    async def wake(self, http: Http) -> None:
        with _own_words():
            await http.post("/resume_memory_occupation", {}, admin=True)

    async def metrics(self, http: Http) -> Metrics:
        try:
            text = await http.get("/metrics", timeout=ANSWER_SECONDS)
        except ServerRefused:
            return Metrics()
        values = summed(str(text))

        def count(name: str) -> int | None:
            return int(values[f"sglang:{name}"]) if f"sglang:{name}" in values else None

        return Metrics(
            running=count("num_running_reqs"),
            waiting=count("num_queue_reqs"),
            prompt_tokens=count("prompt_tokens_total"),
            cached_tokens=count("cached_tokens_total"),
            cache_used=values.get("sglang:token_usage"),
            slots_used=count("lora_pool_slots_used"),
            # the base has one
            slots=None if (slots := count("lora_pool_slots_total")) is None else slots - 1,
        )


async def _read(
    http: Http, version: str | None, text: Sequence[int], start: int, **more: int
) -> replies.ServerReply:
    """Have a text read with the log-probabilities of its tokens from `start` on."""
    body = {
        "rid": uuid.uuid4().hex,
        "input_ids": list(text),
        "lora_path": version,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": max(start - 1, 0),
        **more,
    }
    with _own_words():
        return replies.parsed(await http.post("/generate", body))


@contextlib.contextmanager
def _own_words() -> Iterator[None]:
    try:
        yield
    except ServerRefused as error:
        raise replies.refusal(error) from None


def _parameters(sampling: Sampling, seed: int, max_new_tokens: int) -> dict[str, Any]:
    """Return all parameters, so that no default of the server or of the model comes in."""
    top_k = sampling.top_k or -1
    top_p = sampling.top_p
    if top_k == 1 and sampling.temperature != 0:
        # SGLang would give log-probabilities at temperature 1, if it batches this with nothing else.
        top_k = -1
        top_p = _GREEDY_TOP_P
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # it would ignore these too
        "no_stop_trim": True,
        "sampling_seed": seed & (2**63 - 1),
        **({"json_schema": sampling.schema} if sampling.schema else {}),
    }


async def _pieces(
    http: Http, body: dict[str, Any], sampling: Sampling
) -> AsyncGenerator[tuple[SamplePiece, bool]]:
    """Yield (piece, is_last) of one request; one that ended at the model's own end token has no finish.

    The caller continues from there with a second request; seeds are hashed with positions, so the sample is
    the same as without the break.
    """
    seen = 0
    over = False
    with _own_words():
        async with contextlib.aclosing(http.events("/generate", body)) as events:
            async for data in events:
                reply = replies.parsed(data)
                tokens, logprobs = replies.news(reply, seen)
                seen += len(tokens)
                over = reply.meta_info.finish_reason is not None
                finish = _finish(reply.meta_info.finish_reason, sampling)
                yield SamplePiece(tokens, logprobs, finish, replies.routes(reply)), over
    if not over:
        raise ServerGone("/generate: the stream broke off")


def _finish(reason: replies.FinishReason | None, sampling: Sampling) -> Finish | None:
    if reason is None:
        return None
    if reason.type == "length":
        return "length"
    if reason.type == "abort":
        return "abort"
    if isinstance(reason.matched, int):
        return "stop" if reason.matched in sampling.stop_token_ids else None
    if reason.matched not in sampling.stop:
        raise LoradError(f"the server ended a sample on its own: {reason.matched}")
    return "stop"


def _missing(info: dict[str, Any]) -> Iterator[str]:
    if not info.get("enable_lora"):
        yield "no --enable-lora: only the base can be served"
    if info.get("dp_size", 1) != 1:
        yield "--dp-size above 1: adapters cannot be loaded while it runs"
    if not info.get("enable_memory_saver"):
        yield "no --enable-memory-saver: sleep gives no memory back"
    elif not info.get("enable_weights_cpu_backup"):
        yield "no --enable-weights-cpu-backup: the base's weights are lost in sleep"
    is_lorads = str(info.get("launch_command") or "").endswith(" ".join(NOWHERE))
    if not info.get("enable_deterministic_inference") and not is_lorads:
        yield "no --enable-deterministic-inference: seeds do not count, a sample cannot be made again"
    if not info.get("enable_metrics"):
        yield "no --enable-metrics: throughput, queue and cache are not shown"


class SglangEngine(RemoteEngine):
    """One or several SGLang servers."""

    dialect = SglangDialect
