"""Read and check the answers of an SGLang server."""

import base64
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lorad.engines.remote.http import NotFinite, ServerRefused
from lorad.errors import LoradError
from lorad.protocol.batch import Ranked

_Logprob = tuple[float | None, int, Any]  # of a token: value, id, text


class FinishReason(msgspec.Struct, frozen=True):
    type: str
    matched: int | str | list[int] | None = None
    message: str = ""


class _Meta(msgspec.Struct, frozen=True):
    """SGLang's words about a sample, all of whose tokens so far `completion_tokens` counts."""

    completion_tokens: int = 0
    finish_reason: FinishReason | None = None
    output_token_logprobs: list[_Logprob] = []
    input_token_logprobs: list[_Logprob] = []
    input_top_logprobs: list[list[_Logprob] | None] | None = None
    routed_experts: str | None = None


class ServerReply(msgspec.Struct, frozen=True):
    output_ids: list[int] = []
    meta_info: _Meta = _Meta()


class _SglangFailure(msgspec.Struct, frozen=True):
    message: str = ""
    code: int = 400


def parsed(data: Any) -> ServerReply:
    """Check a reply. Raises ServerRefused for an error amid a stream, LoradError for another shape."""
    if isinstance(data, Mapping) and "error" in data:
        failure = msgspec.convert(data["error"], _SglangFailure)
        text = _first_words(failure.message)
        raise ServerRefused(f"/generate answered {failure.code}: {text}", status=failure.code, text=text)
    try:
        return msgspec.convert(data, ServerReply)
    except msgspec.ValidationError as error:
        raise LoradError(f"the server answered in a form that lorad does not know: {error}") from error


def news(reply: ServerReply, seen: int) -> tuple[list[int], list[float]]:
    """Return the tokens after the first `seen` of a sample, and their log-probabilities.

    A reply of a stream holds what is new since the last one, or all so far, as the server was started. Raises
    NotFinite when a log-probability is missing, of another token, or no number.
    """
    count = reply.meta_info.completion_tokens - seen
    if count <= 0:
        return [], []
    tokens = reply.output_ids[-count:]
    rows = reply.meta_info.output_token_logprobs[-count:]
    logprobs = [value for value, _, _ in rows if value is not None and math.isfinite(value)]
    if [token for _, token, _ in rows] != tokens or len(logprobs) != len(tokens):
        raise NotFinite("SGLang sampled without a finite log-probability for every token")
    return tokens, logprobs


def scores(reply: ServerReply, completion: Sequence[int]) -> np.ndarray:
    """Return log-probabilities of the completion, which was read last, as float32; NaN where none is said."""
    logprobs = reply.meta_info.input_token_logprobs[-len(completion) :] if completion else []
    tokens = [token for _, token, _ in logprobs]
    # SGLang calls the last token of the vocabulary 0; the value is its own.
    if len(tokens) != len(completion) or any(
        a not in (b, 0) for a, b in zip(tokens, completion, strict=True)
    ):
        raise LoradError("the server scored other tokens than it was asked for")
    return np.array([np.nan if value is None else value for value, _, _ in logprobs], np.float32)


def ranked(reply: ServerReply, completion: Sequence[int], most: int) -> Ranked:
    """Return what is said of the last tokens that were read."""
    tops = (reply.meta_info.input_top_logprobs or [])[-len(completion) :] if completion and most else []
    rows = [(top or [])[:most] for top in tops] if most else [[] for _ in completion]
    if len(rows) != len(completion) or any(len(row) != most for row in rows):
        raise LoradError("the server gave fewer tokens in a place than it was asked for")
    return Ranked(
        scores(reply, completion),
        np.array([[token for _, token, _ in row] for row in rows], np.int32).reshape(len(rows), most),
        np.array([[value for value, _, _ in row] for row in rows], np.float32).reshape(len(rows), most),
    )


def routes(reply: ServerReply) -> np.ndarray | None:
    """Return the experts of each token but the last, layer by layer, as a flat array, if it says them."""
    said = reply.meta_info.routed_experts
    if said is None:
        return None
    try:
        return np.frombuffer(base64.b64decode(said, validate=True), "<i4")
    except ValueError as error:
        raise LoradError(f"the server answered routes that lorad does not know: {error}") from error


def refusal(error: ServerRefused) -> ServerRefused:
    """Return the error without SGLang's list of every adapter that it holds or held."""
    match = re.search(r'"(?:error_)?message"\s*:\s*"((?:[^"\\]|\\.)*)', error.text)
    text = _first_words(match.group(1).replace("\\n", "\n").replace('\\"', '"') if match else error.text)
    route = error.message.partition(" ")[0]
    return ServerRefused(
        f"{route} answered {error.code}: {text}", status=error.code, text=text, hint=error.hint
    )


def _first_words(message: str) -> str:
    return re.split(r"\n|All loaded adapters|Loaded LoRAs", message)[0].strip()[:500]
