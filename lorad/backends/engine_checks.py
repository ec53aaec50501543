"""What can be said of a server's installation without starting it. For `lorad doctor --engine`."""

from __future__ import annotations

import shutil

from lorad.backends.engine_install import TRIED, install_hint, install_lines, installed_version, is_older
from lorad.box.config import Backend
from lorad.box.paths import MEMORY
from lorad.children.findings import Finding, Wanted
from lorad.engines.remote.transport import LEAST_FREE
from lorad.errors import SpecError

PACKAGES = ("transformers", "triton", "flashinfer-python", "sglang-kernel")
WANTED = {
    "sglang": Wanted(PACKAGES, ("sgl_kernel",), for_gpus=("flashinfer",)),
    "vllm": Wanted(PACKAGES, ("vllm._C",)),
}


def interpreter(kind: str, backend: Backend | None) -> Finding:
    """Is the server installed beside the interpreter that config.yaml names?"""
    if backend is None or backend.python is None:
        lines = "\n".join(install_lines(kind))
        return Finding(
            "interpreter", False, f"config.yaml names no `python` for {kind}", f"To install it:\n{lines}"
        )
    try:
        version = installed_version(kind, backend.python)
    except SpecError as error:
        return Finding("interpreter", False, error.message, error.hint)
    old = is_older(version, kind)
    about = f" (lorad was tried with {TRIED[kind]} and later)" if old else ""
    facts = {"python": str(backend.python), "version": version, "env": sorted(backend.env)}
    return Finding(
        "interpreter", not old, f"{kind} {version} in {backend.python}{about}", install_hint(kind), facts
    )


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
