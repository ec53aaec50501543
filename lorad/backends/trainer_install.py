"""Whether a trainer that runs in an environment of its own is installed, and how to install it.

Imports none of it.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from lorad.box.paths import checkout
from lorad.children.interpreter import NoInterpreter, installed
from lorad.errors import SpecError

NEEDED = {
    "megatron": (
        *("megatron-bridge", "megatron-core", "torch", "transformers", "safetensors", "msgspec"),
        *("accelerate", "einops", "omegaconf", "pyyaml", "rich", "tqdm", "triton"),  # what Bridge imports
    ),
    "fsdp": ("torch", "transformers", "peft", "accelerate", "safetensors", "msgspec"),
}
"""Distributions, those that make the backend first."""
FOR_GPUS = {"megatron": ("transformer-engine",)}
"""And on GPUs."""
TRIED = {
    "megatron": {"megatron-bridge": "0.6.2", "megatron-core": "0.19.2", "torch": "2.9"},
    "fsdp": {"torch": "2.10", "transformers": "4.57"},
}
"""The oldest that lorad was tried with."""
_NVIDIA = Path("/proc/driver/nvidia/version")
_BESIDE_MEGATRON = (
    "'transformers<=5.12.1,>=5.8' peft accelerate safetensors msgspec 'hydra-core<1.4,>=1.3.2' omegaconf "
    "pyyaml rich tqdm einops triton"
)


def install_lines(backend: str, *, gpu: bool | None = None) -> list[str]:
    """Commands that install the backend, then the lines of config.yaml that name it. gpu: None: looked up.

    On a CPU, Megatron needs what lorad's own tests bring along. Without a checkout of lorad, fsdp is named
    instead.
    """
    if backend == "megatron" and not (_NVIDIA.exists() if gpu is None else gpu):
        if tree := checkout():
            env = f"{{PYTHONPATH: {tree}/tests/trainers/real/megatron_cpu}}"
            return [
                f"{tree}/.ci/setup-engines megatron",
                "# config.yaml, with what it printed as LORAD_MEGATRON_PYTHON:",
                "backends:",
                f"  megatron: {{python: $LORAD_MEGATRON_PYTHON, env: {env}}}",
            ]
        return [
            "# megatron needs a GPU; without one it runs only from lorad's source tree, which has what it "
            "lacks.",
            "# On this machine take trainer.backend: fsdp, which is installed with lorad:",
            "lorad doctor --trainer fsdp",
        ]
    venv = f"~/venvs/{backend}"
    pip = f"{venv}/bin/python -m pip"
    environment = [f"python3.12 -m venv {venv}", f"{pip} install --upgrade pip"]
    if backend == "megatron":
        names = (f"'{name}>={TRIED[backend][name]}'" for name in ("megatron-core", "megatron-bridge"))
        commands = [
            *environment,
            f"{pip} install 'torch>={TRIED[backend]['torch']}' numpy",
            f"{pip} install --no-deps {' '.join(names)}",
            f"{pip} install {_BESIDE_MEGATRON}",
            f"{pip} install --no-build-isolation 'transformer-engine[core_cu13,pytorch]'",
        ]
    else:
        needed = " ".join(
            f"'{name}>={TRIED[backend][name]}'" if name in TRIED[backend] else name
            for name in NEEDED[backend]
        )
        commands = [*environment, f"{pip} install {needed} numpy"]
    return [*commands, "# config.yaml:", "backends:", f"  {backend}: {{python: {venv}/bin/python}}"]


def _install_hint(backend: str) -> str:
    lines = "\n".join(f"    {line}" for line in install_lines(backend))
    where = "" if backend == "megatron" else " beside lorad, or apart from it"
    return (
        f"If {backend} is not installed yet{where}, then in a shell, and in config.yaml of lorad's "
        f"home:\n{lines}"
    )


def mending_hint(backend: str) -> str:
    """Say how to repair an environment that exists but does not fit."""
    lines = "\n".join(f"    {line}" for line in install_lines(backend))
    return f"Mend or upgrade in that environment what is named here, or make a new one of {backend}:\n{lines}"


def interpreter_of(backend: str, named: Path | None) -> Path:
    """Return the interpreter that config.yaml names; for fsdp lorad's own otherwise. Raises SpecError for one
    that is not named.
    """
    if named is not None:
        return named
    if backend == "megatron":
        raise SpecError(
            f"config.yaml names no python for {backend}", key="trainer.backend", hint=_install_hint(backend)
        )
    return Path(sys.executable)


def installed_versions(backend: str, python: Path, *, gpu: bool = False) -> Mapping[str, str]:
    """List the versions of what the backend needs beside the interpreter. Raises SpecError that says what is
    missing.
    """
    needed = (*NEEDED[backend], *(FOR_GPUS.get(backend, ()) if gpu else ()))
    try:
        versions = installed(python, needed)
    except NoInterpreter as error:
        raise SpecError(
            f"{python}, for {backend}: {error}", key="trainer.backend", hint=_install_hint(backend)
        ) from None
    if missing := [name for name in needed if name not in versions]:
        raise SpecError(
            f"{backend} needs {', '.join(missing)}, not installed beside {python}",
            key="trainer.backend",
            hint=_install_hint(backend),
        )
    return versions


def older(backend: str, versions: Mapping[str, str]) -> list[str]:
    """List, as sentences, the packages that are older than the oldest that lorad was tried with."""
    tried = TRIED[backend]
    return [
        f"{name} is {versions[name]}; lorad was tried with {tried[name]} and newer"
        for name in tried
        if name in versions and _numbers(versions[name]) < _numbers(tried[name])
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
