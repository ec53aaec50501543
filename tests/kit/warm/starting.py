"""Starts the warm process: for a run of pytest, or for a program that starts many runs."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kit.warm.client import HEAVY_PLACE, PLACE
from tests.kit.warm.ranks import warm_megatron
from tests.kit.warm.servers import REPOSITORY, warm_sglang


def _listening(place: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(place)
    listener.listen(128)
    return listener


@contextmanager
def warm_process(*, now: bool = False) -> Iterator[None]:
    """Have a warm process, which the environment of this process and of its children names.

    now: it imports at once, else when it is asked for something.
    """
    with tempfile.TemporaryDirectory(prefix="lr-warm-") as directory:
        place = os.environ[PLACE] = f"{directory}/socket"
        with _listening(place) as light, _listening(place + HEAVY_PLACE) as heavy:
            fds = [light.fileno(), heavy.fileno()]
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.warm.server", *map(str, fds), *["--now"] * now],
                stdin=subprocess.PIPE, cwd=REPOSITORY, start_new_session=True, pass_fds=fds,
            )  # fmt: skip
        try:
            with warm_megatron(place), warm_sglang(place):
                yield
        finally:
            process.communicate()
            del os.environ[PLACE]
