"""The warm process of a run of pytest, and its workers as forks of it."""

import os
from contextlib import ExitStack
from typing import Any

import pytest

from lorad.client import launch
from tests.kit.suite.rewritten import rewrite_first
from tests.kit.warm.client import PLACE
from tests.kit.warm.processes import CLIENT, WarmDaemon, have_warm_children
from tests.kit.warm.starting import warm_process


def pytest_configure(config: pytest.Config) -> None:
    """Start the warm process with the first pytest; workers find it in their environment.

    It imports at once where many tests are to be run, else when it is asked for something.
    """
    launch._spawn = WarmDaemon
    if PLACE not in os.environ:
        warm = ExitStack()
        warm.enter_context(warm_process(now=bool(config.getoption("numprocesses", None))))
        config.add_cleanup(warm.close)
    have_warm_children()


@pytest.hookimpl(optionalhook=True)  # where xdist is
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Have each worker forked from the warm process, which imports while this one rewrites asserts."""
    rewrite_first(config)
    for spec in specs:
        spec.python = " ".join(CLIENT)
