"""The power goes: a short version of `make powercut`."""

import pytest

from faults.powercut import play

pytestmark = pytest.mark.system


def test_power_cut_loses_nothing_acknowledged() -> None:
    done, failed = play(seed=3, steps=30, cuts=2)
    assert not failed and sum(done.values()) > 30
