"""Asks another Python what it has installed, and whether it works."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

_ASK_SECONDS = 60.0
_ASK = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_LOOK_SECONDS = 240.0  # to import torch from a cold disk, beside others' work
_LOOK = """
import importlib.metadata, json, platform, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def fault(module):
    try:
        exec(f"import {module}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
import torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
packages, modules, for_gpus = json.loads(sys.argv[1])
print("\\n" + json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "torch_cuda": torch.version.cuda,
    "cuda_available": torch.cuda.is_available(), "gpus": gpus,
    "packages": {name: version(name) for name in packages},
    "kernels": {module: fault(module) for module in modules + (for_gpus if gpus else [])},
}))
"""


class NoInterpreter(Exception):
    """There is no program, or no Python that works; the message says why."""


def output_of(command: Sequence[str], seconds: float, **options: Any) -> str:
    """Run a command and return its output. Raises OSError, and SubprocessError when it fails or is slow."""
    options |= {"capture_output": True, "text": True, "timeout": seconds, "check": True}
    return str(subprocess.run(command, **options).stdout)


def installed(python: Path, names: Sequence[str]) -> Mapping[str, str]:
    """Return the version of each distribution that an interpreter has. Raises NoInterpreter."""
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise NoInterpreter("it is no program")
    try:
        printed = output_of([str(python), "-I", "-c", _ASK, *names], _ASK_SECONDS).strip()
    except (OSError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", None) or error).strip()
        raise NoInterpreter(f"it is no Python that works: {output.rpartition(chr(10))[2]}") from None
    try:
        answer = json.loads(printed.rpartition("\n")[2])
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        output = f"printed {printed[:60]!r}" if printed else "printed nothing"
        raise NoInterpreter(f"it is no Python: asked what is installed, it {output}")
    return answer


class InterpreterFinding(Struct, frozen=True):
    """The result of a check of an environment; `hint` says what to do where it is not ok."""

    name: str
    ok: bool
    detail: str
    hint: str = ""
    facts: dict[str, Any] = {}


class Requirements(Struct, frozen=True):
    """What an environment must have."""

    packages: Sequence[str]  # distributions whose versions are reported
    modules: Sequence[str]  # that must import
    for_gpus: Sequence[str] = ()  # modules that must import where there are GPUs


def installation(
    python: Path, env: Mapping[str, str], requirements: Requirements, hint: str
) -> Iterator[InterpreterFinding]:
    """Yield the checks of torch, GPUs and modules; `hint` says how the environment is made."""
    seen = look(python, env, requirements)
    if isinstance(seen, str):
        whole = f"Is the installation whole?\n{hint}"
        yield InterpreterFinding("torch", False, f"{python} could not be asked: {seen}", whole)
        return
    build = f"CUDA {seen['torch_cuda']}" if seen["torch_cuda"] else "a CPU build"
    gpus = ", ".join(seen["gpus"]) or "no GPU"
    blind = Path("/proc/driver/nvidia/version").exists() and not seen["cuda_available"]
    lacks = (
        "NVIDIA's driver is there: install a torch for CUDA in that environment, of a version that the "
        "driver takes."
    )
    detail = f"{seen['torch']} ({build}), Python {seen['python']}, {gpus}"
    yield InterpreterFinding("torch", not blind, detail, lacks, seen)
    for module, fault in seen["kernels"].items():
        yield InterpreterFinding(module, not fault, fault or "imports", hint)


def look(
    python: Path, env: Mapping[str, str], requirements: Requirements, *, seconds: float = _LOOK_SECONDS
) -> dict[str, Any] | str:
    """Import what is required in the environment. Return its Python's answer, or why there is none."""
    required = json.dumps([requirements.packages, requirements.modules, requirements.for_gpus])
    try:
        command = [str(python), "-c", _LOOK, required]
        printed = output_of(command, seconds, cwd="/", env={**os.environ, **env})
        answer = json.loads(printed.splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    except subprocess.TimeoutExpired:
        return f"it said nothing for {seconds:.0f} s"
    except subprocess.CalledProcessError as error:
        return str((error.stderr.strip().splitlines() or [f"it exited with {error.returncode}"])[-1])
    except (ValueError, IndexError):
        pass
    except OSError as error:
        return str(error)
    return "it gave no answer"
