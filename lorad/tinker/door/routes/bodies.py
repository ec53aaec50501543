"""The JSON bodies of the client's requests; the door ignores fields that it does not know."""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.state import Integer, RequestedLora

_MOST_CHUNKS = 1 << 12
_MOST_STOPS = 64
T = TypeVar("T")


class CreateSession(Struct, frozen=True):
    sdk_version: str
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Struct, frozen=True):
    session_id: str


class _FinishReason(Struct, frozen=True):
    type: str


class Finish(Struct, frozen=True):
    reason: _FinishReason


class OptimizerConfig(Struct, frozen=True):
    type: str = "adamw"


class CreateModel(Struct, frozen=True):
    session_id: str
    model_seq_id: Integer
    base_model: str
    lora_config: RequestedLora | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class OfModel(Struct, frozen=True):
    model_id: str


class Numbered(Struct, frozen=True):
    """What every numbered request has."""

    model_id: str
    seq_id: Integer


class OptimStepBody(Struct, frozen=True):
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsBody(Struct, frozen=True):
    path: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Struct, frozen=True):
    path: str | None = None
    sampling_session_seq_id: Integer | None = None
    kind: str = "snapshot"
    ttl_seconds: float | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Struct, frozen=True):
    """Load weights into a new model of a session, or into a model that was not used yet."""

    path: str
    optimizer: bool
    session_id: str | None = None
    model_seq_id: Integer | None = None
    model_id: str | None = None
    seq_id: Integer | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: str | None = None


class OfRequest(Struct, frozen=True):
    request_id: str


class _FuturesTarget(Struct, frozen=True):
    sampling_session_id: str
    cloned_sampler_id: Integer = 0


class RetrieveFutures(Struct, frozen=True):
    target: _FuturesTarget
    prev_cursor: Integer = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class CreateSamplingSession(Struct, frozen=True):
    session_id: str
    sampling_session_seq_id: Integer
    base_model: str | None = None
    model_path: str | None = None


class OfSampler(Struct, frozen=True):
    sampling_session_id: str


class _Chunk(Struct, frozen=True):
    type: str = "encoded_text"
    tokens: list[Integer] = []


class _ModelInput(Struct, frozen=True):
    chunks: Annotated[list[_Chunk], Meta(max_length=_MOST_CHUNKS)]


class _SamplingParams(Struct, frozen=True):
    """How to sample.

    Attributes:
        stop: None ends at the base's own end tokens, [] at no token.
    """

    max_tokens: Integer | None = None
    seed: Integer | None = None
    stop: str | Annotated[list[str | Integer], Meta(max_length=_MOST_STOPS)] | None = None
    temperature: float = 1.0
    top_k: Integer = -1
    top_p: float = 1.0


class Sample(Struct, frozen=True):
    sampling_session_id: str
    seq_id: Integer
    prompt: _ModelInput
    sampling_params: _SamplingParams = _SamplingParams()
    num_samples: Integer = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Integer | None = None
    topk_prompt_logprobs: Integer = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
    target_prompt_logprobs: Any = None


class OfPath(Struct, frozen=True):
    tinker_path: str


class Ttl(Struct, frozen=True):
    ttl_seconds: float | None = None


def read(data: bytes, kind: type[T]) -> T:
    """Decode a body. Raises HttpError 422."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(422, f"the request is not understood: {error}") from None
