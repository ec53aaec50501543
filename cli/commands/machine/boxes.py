"""What `lorad --host all list` reads: runs of all boxes, each asked by a thread."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from lorad.box.paths import Home, default_home
from lorad.client.boxes.hosts import HERE, Place, far_home, read_hosts
from lorad.client.client import Client
from lorad.errors import HostUnreachable, LoradError

_SECONDS = 5.0  # for a box to answer
T = TypeVar("T")


def of_all_boxes(read: Callable[[Client], T]) -> dict[str, T | LoradError]:
    """Read from the daemons of this machine, if it has a home, and of all boxes of hosts.yaml at once.

    read: what to ask a daemon; it is called in a thread for each.

    Returns by the name of the box what was read, or why nothing was. Nobody is asked for a password. Raises
    SpecError for a hosts.yaml with a mistake.
    """
    home = Home(default_home())
    boxes: dict[str, Place] = {HERE: home} if home.root.exists() else {}
    boxes |= {name: far_home(name, asks=False) for name in read_hosts().hosts}
    answers: dict[str, T | LoradError] = {}

    def ask(name: str, box: Place) -> None:
        try:
            answers[name] = read(Client(box))
        except LoradError as error:
            answers[name] = error

    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in boxes.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = HostUnreachable(f"no answer in {_SECONDS:.0f} s", hint="`lorad --host NAME list` waits longer.")
    return {name: answers.get(name, late) for name in boxes}
