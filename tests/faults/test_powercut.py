"""The power goes: a short version of `make powercut`."""

from tests.faults.powercut import play


def test_power_cut_loses_nothing_acknowledged() -> None:
    done, failed = play(seed=3, steps=30, cuts=2)
    assert not failed and sum(done.values()) > 30
