"""The power goes: a short version of `make powercut`."""

from __future__ import annotations

from tests.faults.powercut import play


def test_after_a_cut_at_any_byte_what_was_acknowledged_is_there() -> None:
    done, failed = play(seed=3, steps=30, cuts=2)
    assert not failed and sum(done.values()) > 30
