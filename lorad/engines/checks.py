"""What can be said of a server's installation without starting it. For `lorad doctor --engine`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from lorad.config import Backend
from lorad.engines.install import TRIED, install_hint, install_lines, installed_version, is_older
from lorad.engines.remote.transport import LEAST_FREE, MEMORY
from lorad.errors import SpecError

LOOK_SECONDS = 60.0
KERNELS = {"sglang": ("sgl_kernel", "flashinfer"), "vllm": ("vllm._C",)}
FOR_GPUS = ("flashinfer",)  # kernels that nothing on a CPU asks for
LOOK = """
import importlib, importlib.metadata, json, platform, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def fault(module):
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
import torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print("\\n" + json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "torch_cuda": torch.version.cuda,
    "cuda_available": torch.cuda.is_available(), "gpus": gpus,
    "packages": {name: version(name) for name in ("transformers", "triton", "flashinfer-python", "sglang-kernel")},
    "kernels": {module: fault(module) for module in sys.argv[1:]},
}))
"""


class Finding(Struct, frozen=True):
    """hint: what to do, when it is not ok."""

    name: str
    ok: bool
    detail: str
    hint: str = ""
    facts: dict[str, Any] = {}


def interpreter(kind: str, backend: Backend | None) -> Finding:
    """Is the server installed beside the interpreter that config.yaml names?"""
    if backend is None or backend.python is None:
        lines = "\n".join(install_lines(kind))
        return Finding("interpreter", False, f"config.yaml names no `python` for {kind}", f"To install it:\n{lines}")
    try:
        version = installed_version(kind, backend.python)
    except SpecError as error:
        return Finding("interpreter", False, error.message, error.hint)
    old = is_older(version, kind)
    about = f" (lorad was tried with {TRIED[kind]} and later)" if old else ""
    facts = {"python": str(backend.python), "version": version, "env": sorted(backend.env)}
    return Finding("interpreter", not old, f"{kind} {version} in {backend.python}{about}", install_hint(kind), facts)


def installation(kind: str, backend: Backend) -> Iterator[Finding]:
    """Torch, GPUs and kernels, as the server's own Python finds them."""
    seen = look(kind, backend)
    if isinstance(seen, str):
        hint = f"Is the installation whole?\n{install_hint(kind)}"
        yield Finding("torch", False, f"{backend.python} could not be asked: {seen}", hint)
        return
    yield torch_and_gpus(seen)
    for module, fault in seen["kernels"].items():
        needed = bool(seen["gpus"]) or module not in FOR_GPUS
        detail = "imports" if not fault else fault if needed else "not there; only GPUs need it"
        yield Finding(module, not (fault and needed), detail, install_hint(kind))


def torch_and_gpus(seen: dict[str, Any]) -> Finding:
    build = f"CUDA {seen['torch_cuda']}" if seen["torch_cuda"] else "a CPU build"
    gpus = ", ".join(seen["gpus"]) or "no GPU"
    driver = Path("/proc/driver/nvidia/version").exists()
    blind = driver and not seen["cuda_available"]
    hint = "NVIDIA's driver is there: install a torch for CUDA in that environment, of a version that the driver takes."
    return Finding("torch", not blind, f"{seen['torch']} ({build}), Python {seen['python']}, {gpus}", hint, seen)


def look(kind: str, backend: Backend) -> dict[str, Any] | str:
    """What LOOK prints, or why it does not, in words."""
    command = [str(backend.python), "-c", LOOK, *KERNELS[kind]]
    environment = os.environ | backend.env
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True, cwd="/", env=environment
        )
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    except subprocess.TimeoutExpired:
        return f"it said nothing for {LOOK_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        return str((error.stderr.strip().splitlines() or [f"it exited with {error.returncode}"])[-1])
    except (OSError, ValueError, IndexError) as error:
        return str(error)


def memory_filesystem() -> Finding:
    """Adapters travel through it where they can; where not, nothing is wrong."""
    try:
        free = shutil.disk_usage(MEMORY).free
    except OSError as error:
        return Finding("shm", True, f"{MEMORY}: {error.strerror}; adapters travel through the disk")
    way = "memory" if free >= LEAST_FREE else "the disk"
    return Finding(
        "shm", True, f"{free >> 20} MiB free in {MEMORY}; adapters travel through {way}", facts={"free": free}
    )
