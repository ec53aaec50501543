"""A short form of `make tinker-crash`."""

import pytest

from tests.tinker import crash

pytestmark = pytest.mark.system


def test_nothing_differs_whatever_is_killed() -> None:
    """Door, lane, pool and daemon, once each, and one answer of twenty is lost."""
    crash.main(6, 4, 0.05)
