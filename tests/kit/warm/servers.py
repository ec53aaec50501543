"""SGLang of the tests: what is in the environment of its servers, and a process that forks them."""

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SGLANG = "LORAD_SGLANG_PYTHON"
LAUNCHED = "/engines/sglang/launch.py"  # what command lines of its servers have in them
_REAL = REPOSITORY / "tests/engines/real"
CPU = {kind: f"{_REAL / f'{kind}_cpu'}{os.pathsep}{_REAL / 'servers_cpu'}" for kind in ("sglang", "vllm")}
"""What is on PYTHONPATH of a server that lacks kernels on a machine without an accelerator."""
_MODELS = {"qwen3", "qwen3_moe"}  # SGLang's modules of the models here
_MODULES = (
    *("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"),
    *("sglang.srt.managers.detokenizer_manager", "sglang.srt.plugins", "sglang.srt.lora.layers"),
    *(f"sglang.srt.models.{model}" for model in sorted(_MODELS)),
)


def other_models() -> str:
    """Name the modules of all other models, which SGLang imports at each start else: 12.2 s of processor, and
    8.5 without.
    """
    home = Path(os.environ.get(SGLANG, "")).parent.parent
    known = {path.stem for path in home.glob("lib/python3*/site-packages/sglang/srt/models/*.py")}
    return ",".join(sorted(known - _MODELS))


@contextmanager
def forks_of(variable: str, place: str, modules: Sequence[str], own: Mapping[str, str]) -> Iterator[None]:
    """Serve forks of an interpreter at a socket, where the environment names it; it imports when it is asked.

    own: what its process has in its environment.
    """
    if not (python := os.environ.get(variable)):
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen(128)
        fd = listener.fileno()
        process = subprocess.Popen(
            [python, "-m", "tests.kit.warm.server", "--only", str(fd), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=REPOSITORY, start_new_session=True, pass_fds=[fd], env=os.environ | own,
        )  # fmt: skip
    yield
    process.communicate()


def warm_sglang(place: str) -> AbstractContextManager[None]:
    """Serve forks of SGLang's interpreter, whose servers are started from `OF_RUNS` of tests/engines/real."""
    own = {
        "PYTHONPATH": f"{CPU['sglang']}{os.pathsep}{REPOSITORY}",
        "SGLANG_DISABLED_MODEL_ARCHS": other_models(),
        "SGLANG_USE_CPU_ENGINE": "1",
        "LORAD_FORKS": "1",
    }
    return forks_of(SGLANG, f"{place}.sglang", _MODULES, own)
