"""What another Python has installed and whether it works, found out by asking it."""

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
    """The path is no program, or no Python that works; the message says why."""


def installed(python: Path, names: Sequence[str]) -> Mapping[str, str]:
    """Return the version of each distribution that is there beside the interpreter. Raises NoInterpreter."""
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise NoInterpreter("it is no program")
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _ASK, *names],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise NoInterpreter(f"it is no Python that works: {said.rpartition(chr(10))[2]}") from None
    printed = done.stdout
    try:
        answer = json.loads(printed.strip().rpartition("\n")[2])
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        said = f"printed {printed.strip()[:60]!r}" if printed.strip() else "printed nothing"
        raise NoInterpreter(f"it is no Python: asked what is installed, it {said}")
    return answer


class InterpreterFinding(Struct, frozen=True):
    """One thing that was checked about an environment.

    hint: What to do where it is not ok.
    """

    name: str
    ok: bool
    detail: str
    hint: str = ""
    facts: dict[str, Any] = {}


class Requirements(Struct, frozen=True):
    """The packages that an environment must have.

    packages: Distributions whose versions are reported.
    modules: Modules that must import.
    for_gpus: Modules that must import where there are GPUs.
    """

    packages: Sequence[str]
    modules: Sequence[str]
    for_gpus: Sequence[str] = ()


def installation(
    python: Path, env: Mapping[str, str], requirements: Requirements, hint: str
) -> Iterator[InterpreterFinding]:
    """Yield torch, GPUs and modules as the environment's own Python has them; `hint` says how it is made."""
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
    """Import what is required in the environment, for at most so many seconds. Returns what its Python prints
    of it, or why it prints nothing.
    """
    required = json.dumps([requirements.packages, requirements.modules, requirements.for_gpus])
    command = [str(python), "-c", _LOOK, required]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
            cwd="/",
            env={**os.environ, **env},
        )
        answer = json.loads(done.stdout.splitlines()[-1])
        return answer if isinstance(answer, dict) else "it gave no answer"
    except subprocess.TimeoutExpired:
        return f"it said nothing for {seconds:.0f} s"
    except subprocess.CalledProcessError as error:
        return str((error.stderr.strip().splitlines() or [f"it exited with {error.returncode}"])[-1])
    except (ValueError, IndexError):
        return "it gave no answer"
    except OSError as error:
        return str(error)
