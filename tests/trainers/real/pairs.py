"""Where the real backends are, and what `config.yaml` says of them here."""

from typing import Any

from tests.engines.real import places as engines
from tests.kit.warm.ranks import MEGATRON_CPU, interpreter

TRAINERS = ("builtin", "fsdp", "megatron")
ENGINES = ("builtin", *engines.KINDS)
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
    environments = {"megatron": {"PYTHONPATH": str(MEGATRON_CPU)}, **engines.OF_RUNS}
    installed = [backend for backend in backends if backend in INSTALLED]
    return {b: {"python": interpreter(python_of(b)), "env": environments[b]} for b in installed}
