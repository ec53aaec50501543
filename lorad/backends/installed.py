"""Find out whether a server or a trainer with ranks is installed, and say how to install it.

Imports none of them.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lorad.backends import recipes
from lorad.children.interpreter import NoInterpreter, installed
from lorad.errors import SpecError
from lorad.servers.table import SERVERS

NEEDED = {
    "megatron": (
        *("megatron-bridge", "megatron-core", "torch", "transformers", "safetensors", "msgspec"),
        *("accelerate", "einops", "omegaconf", "pyyaml", "rich", "tqdm", "triton"),  # what Bridge imports
    ),
    "fsdp": ("torch", "transformers", "peft", "accelerate", "safetensors", "msgspec"),
}
"""Distributions of trainers, those that make the backend first."""
FOR_GPUS = {"megatron": ("transformer-engine",)}
"""And on GPUs."""
TRIED = {
    "megatron": {"megatron-bridge": "0.6.2", "megatron-core": "0.19.2", "torch": "2.9"},
    "fsdp": {"torch": "2.10", "transformers": "4.57"},
}
"""The oldest that lorad was tried with."""


def install_lines(backend: str, *, gpu: bool | None = None) -> list[str]:
    """List the commands that install a backend, then its lines of config.yaml; `recipes` describes `gpu`."""
    if backend != "fsdp":
        return recipes.install_lines(backend, gpu=gpu)
    python = f"{recipes.PREFIX}/{backend}/bin/python"
    tried = TRIED[backend]
    needed = (f"'{name}>={tried[name]}'" if name in tried else name for name in NEEDED[backend])
    return [
        f"python3.12 -m venv {recipes.PREFIX}/{backend}",
        f"{python} -m pip install {' '.join(needed)} numpy",
        "# config.yaml:",
        "backends:",
        f"  {backend}: {{python: {python}}}",
    ]


def install_hint(backend: str) -> str:
    """Say how to install a backend."""
    lines = "\n".join(f"    {line}" for line in install_lines(backend))
    where = " beside lorad, or apart from it" if backend == "fsdp" else ""
    home = f"in a shell, and in config.yaml of lorad's home:\n{lines}"
    return f"If {backend} is not installed yet{where}, then {home}"


def mending_hint(backend: str) -> str:
    """Say how to repair an environment that exists but does not fit."""
    lines = "\n".join(f"    {line}" for line in install_lines(backend))
    return f"Mend or upgrade in that environment what is named here, or make a new one of {backend}:\n{lines}"


def interpreter_of(backend: str, named: Path | None) -> Path:
    """Return the interpreter that config.yaml names, or lorad's own for fsdp. Raises SpecError."""
    if named is not None:
        return named
    if backend == "megatron":
        raise SpecError(
            f"config.yaml names no python for {backend}", key="trainer.backend", hint=install_hint(backend)
        )
    return Path(sys.executable)


def installed_version(server: str, python: Path) -> str:
    """Return the server's version beside an interpreter. Raises SpecError that says how to install it."""
    names = SERVERS[server].distributions
    versions = _versions(server, python, names, "rollout.backend")
    if not versions:
        problem = f"{server} is not installed beside {python}"
        raise SpecError(problem, key="rollout.backend", hint=install_hint(server))
    return next(versions[name] for name in names if name in versions)


def installed_versions(trainer: str, python: Path, *, gpu: bool = False) -> Mapping[str, str]:
    """List the versions of what the trainer needs beside an interpreter. Raises SpecError for a lack."""
    needed = (*NEEDED[trainer], *(FOR_GPUS.get(trainer, ()) if gpu else ()))
    versions = _versions(trainer, python, needed, "trainer.backend")
    if missing := [name for name in needed if name not in versions]:
        problem = f"{trainer} needs {', '.join(missing)}, not installed beside {python}"
        raise SpecError(problem, key="trainer.backend", hint=install_hint(trainer))
    return versions


def _versions(backend: str, python: Path, names: Sequence[str], key: str) -> Mapping[str, str]:
    try:
        return installed(python, names)
    except NoInterpreter as error:
        raise SpecError(f"{python}, for {backend}: {error}", key=key, hint=install_hint(backend)) from None


def is_older(version: str, server: str) -> bool:
    """Return whether a version is older than the oldest that lorad was tried with."""
    return _numbers(version) < _numbers(SERVERS[server].tried)


def older(trainer: str, versions: Mapping[str, str]) -> list[str]:
    """List, as sentences, the packages that are older than the oldest that lorad was tried with."""
    tried = TRIED[trainer]
    return [
        f"{name} is {versions[name]}; lorad was tried with {tried[name]} and newer"
        for name in tried
        if name in versions and _numbers(versions[name]) < _numbers(tried[name])
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
