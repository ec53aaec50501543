"""Where the real backends are, and what `config.yaml` says of them here."""

from pathlib import Path
from typing import Any

from tests.engines.real import places as engines

TRAINERS = ("builtin", "fsdp", "megatron")
ENGINES = ("builtin", *engines.KINDS)
# what Megatron lacks on a machine without an accelerator
MEGATRON_CPU = Path(__file__).parent / "megatron_cpu"
INSTALLED = ("megatron", *engines.KINDS)  # in environments of their own; the others are in lorad's


def python_of(backend: str) -> str:
    """The interpreter of a backend's virtual environment; "" where it is not named."""
    return engines.python_of(backend)


def missing(*backends: str) -> list[str]:
    """The variables that would have to name an interpreter."""
    return [
        engines.variable(backend) for backend in backends if backend in INSTALLED and not python_of(backend)
    ]


def configured(*backends: str) -> dict[str, Any]:
    """The `backends` of a home's `config.yaml`."""
    environments = {"megatron": {"PYTHONPATH": str(MEGATRON_CPU)}, **engines.ENVIRONMENT}
    return {b: {"python": python_of(b), "env": environments[b]} for b in backends if b in INSTALLED}
