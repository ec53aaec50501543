"""A short form of `make tinker-crash`."""

from tests.tinker import crash


def test_nothing_differs_whatever_is_killed() -> None:
    """Door, lane, pool and daemon, once each, and one answer of twenty is lost."""
    crash.main(6, 4, 0.05)
