"""Frames: arrays travel as they are, many chunks in few arrays; a peer with another format gets an error."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lorad.protocol import frames
from lorad.protocol.batch import FINISHES, Chunk, Chunks, Prompt
from lorad.protocol.frames import BadFrame


def travelled(message: Any) -> Any:
    return frames.read(io.BytesIO(b"".join(frames.encode(message))).readinto, dict)


@pytest.mark.parametrize("dtype", frames.DTYPES)
def test_arrays_travel_bit_for_bit_and_aligned(dtype: str) -> None:
    sent = [
        np.arange(n).astype(dtype).reshape(shape)
        for n, shape in ((3, (3,)), (6, (2, 3)), (0, (0, 2)), (1, ()))
    ]
    got = travelled({"arrays": sent, "beside": "text"})
    for one, other in zip(sent, got["arrays"], strict=True):
        assert other.dtype == dtype and other.shape == one.shape and np.array_equal(one, other)
        assert other.flags.aligned


def test_only_small_arrays_are_copied() -> None:
    large = np.zeros(frames.JOIN_BELOW, np.uint8)
    assert len(frames.encode({"small": large[:100], "other": large[:3]})) == 1
    assert any(
        isinstance(part, memoryview) and part.obj is not None for part in frames.encode({"large": large})
    )
    assert np.array_equal(travelled({"large": large})["large"], large)


def test_array_of_unknown_type_is_refused_unsent() -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        frames.encode({"complex": np.zeros(2, np.complex64)})


@pytest.mark.parametrize("change", [lambda body: body[:-1], lambda body: body + b"!", lambda body: body[:4]])
def test_body_must_match_its_prefix(change: Callable[[bytes], bytes]) -> None:
    frame = b"".join(frames.encode({"array": np.arange(5, dtype=np.int32)}))
    start = frames.PREFIX.size
    with pytest.raises(BadFrame):
        frames.decode(frames.parse_prefix(frame[:start]), change(frame[start:]), dict)


def test_a_source_that_ends_early_is_lost() -> None:
    frame = b"".join(frames.encode({"array": np.arange(5, dtype=np.int32)}))
    with pytest.raises(ConnectionResetError):
        frames.read(io.BytesIO(frame[:-1]).readinto, dict)


async def test_awaited_frames_are_read_the_same() -> None:
    frame = b"".join(frames.encode({"array": np.arange(5.0, dtype="float32")}))
    for end in (len(frame), len(frame) - 1, 3):
        source = io.BytesIO(frame[:end])

        async def recv_into(rest: memoryview, source: io.BytesIO = source) -> int:
            return source.readinto(rest[:7])

        if end == len(frame):
            assert (await frames.read_async(recv_into, dict))["array"].tolist() == [0, 1, 2, 3, 4]
        else:
            with pytest.raises(ConnectionResetError):
                await frames.read_async(recv_into, dict)


def test_many_chunks_travel_in_few_arrays() -> None:
    prompts = [Prompt(name, np.array([1], np.int32), np.array([0], np.uint64)) for name in ("a", "b")]
    chunks = [
        Chunk(name, index, "run@1", np.arange(size, dtype=np.int32), np.full(size, -1.5, np.float32), finish)
        for name, index, size, finish in (
            ("b", 1, 3, FINISHES[1]),
            ("a", 0, 0, FINISHES[3]),
            ("b", 0, 2, None),
        )
    ]
    again = list(Chunks.of("run@1", chunks, {"a": 0, "b": 1}).split(prompts))
    assert [(c.prompt, c.index, c.finish) for c in again] == [(c.prompt, c.index, c.finish) for c in chunks]
    assert all(np.array_equal(one.tokens, other.tokens) for one, other in zip(chunks, again, strict=True))
    assert all(np.array_equal(one.logprobs, other.logprobs) for one, other in zip(chunks, again, strict=True))
