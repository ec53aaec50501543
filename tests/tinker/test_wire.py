"""What a client may send as protobuf: read as arrays, or refused in words, whatever it is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.tinker.door.errors import BadRequest
from lorad.tinker.door.messages import FLOAT32, M
from lorad.tinker.door.wire import Limits, read_head, read_pass, tensor
from lorad.tinker.records import Pass
from tests.tinker.door_kit import a_pass, put

LIMITS = Limits(vocab=100, positions=64)


def read(data: bytes) -> Pass:
    return read_pass(read_head(data), LIMITS)


def csr(rows: list[int], columns: list[int], values: list[float], shape: tuple[int, ...]) -> Any:
    message = M["Tensor"](dtype=FLOAT32, shape=shape)
    message.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
    message.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
    message.sparse_csr.values = np.array(values, np.float32).tobytes()
    return message


def test_datums_are_flat_arrays() -> None:
    made = read(a_pass("m", 1))
    assert made.tokens.tolist() == [5, 6, 7, 8, 9] and made.targets.tolist() == [6, 7, 0, 9, 0]
    assert made.lengths.tolist() == [3, 2] and made.arrays["weights"].tolist() == [1.0] * 5


def test_order_of_a_map_is_no_difference() -> None:
    def swap(message: Any) -> None:
        for datum in message.data:
            weights = M["Tensor"].FromString(datum.loss_fn_inputs["weights"].SerializeToString())
            del datum.loss_fn_inputs["weights"]
            datum.loss_fn_inputs["weights"].CopyFrom(weights)

    digests = {read_head(a_pass("m", 1, change)).digest for change in (None, swap)}
    assert len(digests) == 1 and read_head(a_pass("m", 1, forward_only=True)).digest not in digests


def test_sparse_tensors_are_filled_up() -> None:
    assert tensor(csr([0, 2], [0, 2], [1.0, 2.0], (1, 3)), 3).tolist() == [1.0, 0.0, 2.0]
    assert tensor(csr([0, 1, 1, 2], [0, 0], [1.0, 2.0], (3, 1)), 3).tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    "message",
    [
        csr([0, 2], [0, 3], [1.0, 2.0], (1, 3)),
        csr([0, 2], [0, -1], [1.0, 2.0], (1, 3)),
        csr([0, 9], [0, 1], [1.0, 2.0], (1, 3)),
        csr([0, 2, 0, 2], [0, 0], [1.0, 2.0], (3, 1)),
        csr([0, 1], [0], [1.0], (1 << 40, 1 << 40)),
        csr([0, 1], [0], [1.0], (3,)),
        csr([], [], [], (0, 3)),
        M["Tensor"](dtype=FLOAT32, shape=[-1], dense=b"abcd"),
        M["Tensor"](dtype=FLOAT32, shape=[2], dense=b"abcd"),
        M["Tensor"](dtype=FLOAT32, dense=b"abc"),
        M["Tensor"](dtype=0, dense=b"abcd"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(message: Any) -> None:
    with pytest.raises(BadRequest):
        tensor(message, 3)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read(data)
    except BadRequest as error:
        assert str(error)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_request_is_read_or_refused(data: st.DataObject) -> None:
    good = bytearray(a_pass("model", 3))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    try:
        made = read(bytes(good[:cut]))
    except BadRequest as error:
        assert str(error)
    else:
        check(made)


numbers = st.lists(st.integers(-(1 << 62), 1 << 62), max_size=6)


@given(numbers, numbers, st.lists(st.floats(width=32), max_size=6), st.lists(st.integers(-2, 70), max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_sparse_weights_are_read_or_refused(
    rows: list[int], columns: list[int], values: list[float], shape: list[int]
) -> None:
    def change(message: Any) -> None:
        message.data[0].loss_fn_inputs["weights"].CopyFrom(csr(rows, columns, values, tuple(shape)))

    try:
        made = read(a_pass("m", 1, change))
    except BadRequest as error:
        assert str(error)
    else:
        check(made)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_targets_are_read_or_refused(targets: list[int]) -> None:
    def change(message: Any) -> None:
        put(message.data[0], "target_tokens", np.array(targets, np.int64))

    try:
        check(read(a_pass("m", 1, change)))
    except BadRequest as error:
        assert "data[0]" in str(error)


def check(made: Pass) -> None:
    """Whatever is let through is what the lane counts on."""
    size = int(made.lengths.sum())
    assert made.tokens.shape == made.targets.shape == (size,) and (made.lengths > 0).all()
    assert made.tokens.dtype == made.targets.dtype == np.int32
    for ids in (made.tokens, made.targets):
        assert 0 <= ids.min() <= ids.max() < LIMITS.vocab
    for values in made.arrays.values():
        assert values.shape == (size,) and values.dtype == np.float32 and np.isfinite(values).all()
    assert all(np.isfinite(value) for value in made.config.values())
