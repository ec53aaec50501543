"""What all tests of the daemon share."""

import math

import pytest

from lorad.daemon.queue import place


@pytest.fixture(autouse=True)
def whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass places every run that it can, however slow the machine is."""
    monkeypatch.setattr(place, "PLACE_SECONDS", math.inf)
