"""What all tests of the daemon share."""

import math
from collections.abc import Iterator

import pytest

from lorad.daemon.queue import place
from tests.kit.daemon_world import close_opened


@pytest.fixture(autouse=True)
def whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass places every run that it can, however slow the machine is."""
    monkeypatch.setattr(place, "PLACE_SECONDS", math.inf)


@pytest.fixture(autouse=True)
def closed_contexts() -> Iterator[None]:
    """No context that a test opened stays open."""
    yield
    close_opened()
