"""A test of a trainer or an engine that failed shows the end of every log."""

from tests.trainers.real.conftest import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]
