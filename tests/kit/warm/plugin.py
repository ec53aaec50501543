"""The warm process of a run of pytest, and its workers as forks of it."""

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lorad.client import launch
from tests.kit.suite.rewritten import rewrite_first
from tests.kit.warm.client import HEAVY_PLACE, PLACE
from tests.kit.warm.processes import CLIENT, WarmDaemon, have_warm_children
from tests.kit.warm.ranks import warm_megatron
from tests.kit.warm.servers import warm_sglang

REPOSITORY = Path(__file__).parents[3]


def listening(place: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(place)
    listener.listen(128)
    return listener


def pytest_configure(config: pytest.Config) -> None:
    """Start the warm process with the first pytest; workers find it in their environment.

    It imports at once where many tests are to be run, else when it is asked for something.
    """
    launch._spawn = WarmDaemon
    if PLACE not in os.environ:
        start_warm_process(config)
    have_warm_children()


def start_warm_process(config: pytest.Config) -> None:
    """Start it for this process and its workers; it ends with this one."""
    directory = tempfile.TemporaryDirectory(prefix="lr-warm-")
    place = os.environ[PLACE] = f"{directory.name}/socket"
    now = ["--now"] if config.getoption("numprocesses", None) else []
    with listening(place) as light, listening(place + HEAVY_PLACE) as heavy:
        fds = [light.fileno(), heavy.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.warm.server", *map(str, fds), *now],
            stdin=subprocess.PIPE, cwd=REPOSITORY, start_new_session=True, pass_fds=fds,
        )  # fmt: skip

    others = ExitStack()
    others.enter_context(warm_megatron(place))
    others.enter_context(warm_sglang(place))

    def end() -> None:
        others.close()
        process.communicate()
        directory.cleanup()
        del os.environ[PLACE]

    config.add_cleanup(end)


@pytest.hookimpl(optionalhook=True)  # where xdist is
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Have each worker forked from the warm process, which imports while this one rewrites asserts."""
    rewrite_first(config)
    for spec in specs:
        spec.python = " ".join(CLIENT)
