"""Ranks of trainers that are forked, of Megatron's interpreter too, and what checks and drivers start of
lorad's own: each would import for seconds else.
"""

import os
import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tests.kit.warm import client
from tests.kit.warm.client import HEAVY_FILES, HEAVY_PLACE, NAMES, PLACE, TEMPLATES, WORKER
from tests.kit.warm.servers import LAUNCHED, REPOSITORY, SGLANG, forks_of

AGENT = "lorad.nodes.agent"
MEGATRON = "LORAD_MEGATRON_PYTHON"
# what Megatron lacks on a machine without an accelerator
MEGATRON_CPU = REPOSITORY / "tests/trainers/real/megatron_cpu"
MEGATRON_MODULES = (
    *(WORKER, "lorad.trainers.megatron.body", "megatron.bridge", "megatron.bridge.models.gpt_provider"),
    *("megatron.bridge.peft.canonical_lora", "megatron.core.extensions.transformer_engine"),
)
_FORKED = " | ".join(f'*" {module} "*' for module in (WORKER, *NAMES, TEMPLATES, AGENT))
SCRIPT = f"""#!/bin/sh
case " $* " in {_FORKED} | *{HEAVY_FILES}" "* | *{LAUNCHED}" "*)
    {PLACE}=%s exec %s -I -S %s "$@" ;;
esac
exec %s "$@"
"""


def interpreter(real: str) -> str:
    """Return the path of what runs ranks, names, templates and SGLang's servers as forks, and all else as
    `real` does, one of the interpreters that have them; `real` itself where nothing is warm.
    """
    names = {os.environ.get(SGLANG): "sglang", os.environ.get(MEGATRON): "megatron", sys.executable: "python"}
    if (place := os.environ.get(PLACE)) is None or real not in names:
        return real
    name = names[real]
    if not (path := Path(place).with_name(name)).exists():
        socket_of_it = place if real == sys.executable else f"{place}.{name}"
        words = (socket_of_it, sys.executable, client.__file__, real)
        draft = path.with_name(f"{name}-{os.getpid()}")
        draft.write_text(SCRIPT % tuple(map(shlex.quote, words)))
        draft.chmod(0o755)
        draft.rename(path)
    return str(path)


def warm_megatron(place: str) -> AbstractContextManager[None]:
    """Serve forks of Megatron's interpreter, where the environment names one."""
    own = {"PYTHONPATH": f"{MEGATRON_CPU}:{REPOSITORY}"}
    return forks_of(MEGATRON, f"{place}.megatron{HEAVY_PLACE}", MEGATRON_MODULES, own)
