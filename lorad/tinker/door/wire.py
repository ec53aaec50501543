"""Translates the client's protobuf into arrays and back, and checks what it sends before anything is kept."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from lorad.tinker.door.errors import BadRequest
from lorad.tinker.door.messages import FLOAT32, INT32, INT64, M
from lorad.tinker.losses import check
from lorad.tinker.records import Loss, Pass, Passed

_DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype(np.float32),
    INT64: np.dtype(np.int64),
    INT32: np.dtype(np.int32),
}
_MOST_DATUMS = 1 << 16
_MOST_NUMBERS = 1 << 24  # of a tensor, and tokens of a pass


class Limits(NamedTuple):
    """What a base takes: how many different tokens, and how many in all."""

    vocab: int
    positions: int


class _Head(NamedTuple):
    """What says whose a pass is, with the whole message."""

    model_id: str
    seq: int
    digest: str
    backward: bool
    message: Any


class Sample(NamedTuple):
    """A sample with its tokens, int32 [t], and their log-probabilities, float32 [t]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool


Top = tuple[np.ndarray, np.ndarray]
"""The most likely tokens in each place of a prompt, int32 [P, k], and their log-probabilities, float32."""


def read_head(body: bytes) -> _Head:
    """Read whose a pass is. Raises BadRequest where the body is no ForwardBackwardRequest."""
    try:
        message = M["ForwardBackwardRequest"].FromString(body)
        canonical = message.SerializeToString(deterministic=True)  # entries of maps come in any order
    except Exception as error:
        raise BadRequest(f"this is not a ForwardBackwardRequest: {error}") from None
    digest = hashlib.sha256(canonical).hexdigest()
    return _Head(message.model_id, message.seq_id, digest, not message.forward_only, message)


def read_pass(head: _Head, limits: Limits) -> Pass:
    """Read and check a pass. Raises BadRequest that names the datum and the field."""
    message = head.message
    if not 0 < len(message.data) <= _MOST_DATUMS:
        raise BadRequest(f"data has {len(message.data)} datums; from 1 to {_MOST_DATUMS} are taken at once")
    if (name := message.loss_fn) not in get_args(Loss):
        losses = ", ".join(get_args(Loss))
        if name == "stable_reinforce":
            raise BadRequest(
                f"loss_fn stable_reinforce is Tinker's own, and not published. There are {losses}; recipes "
                "of the cookbook take loss_fn=importance_sampling"
            )
        raise BadRequest(f"loss_fn {name!r} is not known here; there are {losses}")
    config = {key: float(value) for key, value in message.loss_fn_config.items()}
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise BadRequest(f"loss_fn_config: {key} must be a number")
        config[key] = float(value.number)
    tokens = list[np.ndarray]()
    targets = list[np.ndarray]()
    arrays: dict[str, list[np.ndarray]] = {}
    total = 0
    for place, datum in enumerate(message.data):
        try:
            ids, datum_targets, inputs = _read_datum(datum, limits)
            targets.append(datum_targets)
            for key, values in check(name, config, inputs, ids.size).items():
                arrays.setdefault(key, []).append(values)
        except (BadRequest, ValueError) as error:
            raise BadRequest(f"data[{place}]: {error}") from None
        tokens.append(ids)
        total += ids.size
        if total > _MOST_NUMBERS:
            raise BadRequest(f"a request has more than {_MOST_NUMBERS} tokens; send fewer datums at once")
    return Pass(
        tokens=np.concatenate(tokens),
        lengths=np.array([part.size for part in tokens], np.int32),
        targets=np.concatenate(targets),
        loss=cast("Loss", name),
        arrays={key: np.concatenate(parts) for key, parts in arrays.items()},
        config=config,
        backward=head.backward,
    )


def _read_datum(datum: Any, limits: Limits) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return the tokens of a datum, its targets, and its inputs by name. Raises BadRequest."""
    parts = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise BadRequest(f"model_input has a chunk of {kind or 'no kind'}; only text is supported")
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype(np.int32), "model_input"))
    ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    check_tokens(ids, limits, "model_input")
    inputs = {key: tensor(value, ids.size) for key, value in datum.loss_fn_inputs.items()}
    targets = inputs.get("target_tokens")
    if targets is None:
        raise BadRequest("loss_fn_inputs has no target_tokens")
    if targets.shape != ids.shape:
        raise BadRequest(f"target_tokens has {targets.size} numbers; model_input has {ids.size} tokens")
    if targets.dtype.kind != "i":
        raise BadRequest("target_tokens must be integers")
    check_tokens(targets, limits, "target_tokens")
    return ids, targets.astype(np.int32), inputs


def check_tokens(ids: np.ndarray, limits: Limits, name: str) -> None:
    """Raise BadRequest where there are no tokens, too many, or tokens that the base does not have."""
    if not ids.size:
        raise BadRequest(f"{name} has no tokens")
    if ids.size > limits.positions:
        raise BadRequest(f"{name} has {ids.size} tokens; the base takes {limits.positions}")
    if wrong := ids[(ids < 0) | (ids >= limits.vocab)][:1].tolist():
        raise BadRequest(f"{name} has the token {wrong[0]}; the base has the tokens 0 to {limits.vocab - 1}")


def tensor(message: Any, most: int) -> np.ndarray:
    """Read a Tensor of at most so many numbers, as one dimension. A sparse one is 0 where it has no number.

    Raises BadRequest.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BadRequest(f"a tensor has the type {message.dtype}; float32, int64 and int32 are taken")
    shape = tuple(message.shape)
    if min(shape, default=0) < 0 or math.prod(shape) > most:
        raise BadRequest(
            f"a tensor has the shape {list(shape)}; it may have a number for each of {most} tokens"
        )
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        if len(shape) != 2:
            raise BadRequest(f"a sparse tensor has the shape {list(shape)}; it must have two dimensions")
        values = _numbers(csr.values, dtype, "a sparse tensor")
        rows = _numbers(csr.crow_indices, np.dtype(np.int64), "crow_indices")
        columns = _numbers(csr.col_indices, np.dtype(np.int64), "col_indices")
        counts = np.diff(rows)
        is_whole = rows.size == shape[0] + 1 and rows[0] == 0 and rows[-1] == values.size == columns.size
        if not is_whole or (counts < 0).any():
            raise BadRequest("crow_indices of a sparse tensor do not fit its shape and values")
        if columns.size and not 0 <= int(columns.min()) <= int(columns.max()) < shape[1]:
            raise BadRequest(f"col_indices of a sparse tensor are not all below {shape[1]}")
        dense = np.zeros(shape, dtype)
        dense[np.repeat(np.arange(shape[0]), counts), columns] = values
        return dense.reshape(-1)
    values = _numbers(message.dense, dtype, "a tensor")
    if shape and values.size != math.prod(shape):
        raise BadRequest(f"a tensor of the shape {list(shape)} has {values.size} numbers")
    return values


def _numbers(data: bytes, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise BadRequest(f"{name} has {len(data)} bytes, which are no {dtype.name}s")
    return np.frombuffer(data, dtype)


def write_output(passed: Passed) -> bytes:
    """Encode a ForwardBackwardOutput with the log-probabilities of each datum."""
    message = M["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=passed.metrics)
    record = message.loss_fn_outputs.add(num_datums=passed.lengths.size)
    field = record.fields["logprobs"]
    field.data = np.ascontiguousarray(passed.logprobs, np.float32).tobytes()
    field.dtype = FLOAT32
    field.offsets = (4 * np.cumsum([0, *passed.lengths])).astype(np.int64).tobytes()
    encoded: bytes = message.SerializeToString()
    return encoded


def write_samples(
    samples: Sequence[Sample], prompt_logprobs: np.ndarray | None = None, top: Top | None = None
) -> bytes:
    """Encode a SampleResponse.

    Args:
        prompt_logprobs: The prompt's log-probabilities, float32 [P]; NaN where there is none.
    """
    message = M["SampleResponse"]()
    for sample in samples:
        message.sequences.add(
            stop_reason=0 if sample.stopped else 1,
            tokens=np.ascontiguousarray(sample.tokens, np.int32).tobytes(),
            logprobs=np.ascontiguousarray(sample.logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(prompt_logprobs, np.float32).tobytes()
    if top is not None:
        ids, logprobs = top
        message.topk_prompt_logprobs.token_ids = np.ascontiguousarray(ids, np.int32).tobytes()
        message.topk_prompt_logprobs.logprobs = np.ascontiguousarray(logprobs, np.float32).tobytes()
        message.topk_prompt_logprobs.length, message.topk_prompt_logprobs.k = ids.shape
    encoded: bytes = message.SerializeToString()
    return encoded
