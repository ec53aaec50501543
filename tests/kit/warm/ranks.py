"""Ranks of trainers that are forked, of Megatron's interpreter too, and what checks and drivers start of
lorad's own: each would import for seconds else.
"""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.warm import client
from tests.kit.warm.client import HEAVY_FILES, HEAVY_PLACE, NAMES, PLACE, TEMPLATES, WORKER

AGENT = "lorad.nodes.agent"
REPOSITORY = Path(__file__).parents[3]
MEGATRON = "LORAD_MEGATRON_PYTHON"
# what Megatron lacks on a machine without an accelerator
MEGATRON_CPU = REPOSITORY / "tests/trainers/real/megatron_cpu"
MEGATRON_MODULES = (
    *(WORKER, "lorad.trainers.megatron.body", "megatron.bridge", "megatron.bridge.models.gpt_provider"),
    *("megatron.bridge.peft.canonical_lora", "megatron.core.extensions.transformer_engine"),
)
_FORKED = " | ".join(f'*" {module} "*' for module in (WORKER, *NAMES, TEMPLATES, AGENT))
SCRIPT = f"""#!/bin/sh
case " $* " in {_FORKED} | *{HEAVY_FILES}" "*)
    {PLACE}=%s exec %s -I -S %s "$@" ;;
esac
exec %s "$@"
"""


def interpreter(real: str) -> str:
    """Return the path of what runs ranks, names and templates as forks, and all else as `real` does, one of
    the two interpreters that have ranks; `real` itself where nothing is warm.
    """
    if (place := os.environ.get(PLACE)) is None or real not in (sys.executable, os.environ.get(MEGATRON)):
        return real
    name = "python" if real == sys.executable else "megatron"
    if not (path := Path(place).with_name(name)).exists():
        socket_of_it = place if real == sys.executable else f"{place}.{name}"
        words = (socket_of_it, sys.executable, client.__file__, real)
        draft = path.with_name(f"{name}-{os.getpid()}")
        draft.write_text(SCRIPT % tuple(map(shlex.quote, words)))
        draft.chmod(0o755)
        draft.rename(path)
    return str(path)


@contextmanager
def warm_megatron(place: str) -> Iterator[None]:
    """Serve forks of Megatron's interpreter, where the environment names one; it imports when it is asked."""
    if not (python := os.environ.get(MEGATRON)):
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{place}.megatron{HEAVY_PLACE}")
        listener.listen(128)
        fd = listener.fileno()
        process = subprocess.Popen(
            [python, "-m", "tests.kit.warm.server", "--only", str(fd), *MEGATRON_MODULES],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=REPOSITORY, start_new_session=True, pass_fds=[fd],
            env=os.environ | {"PYTHONPATH": f"{MEGATRON_CPU}:{REPOSITORY}"},
        )  # fmt: skip
    yield
    process.communicate()
