"""The control plane for LoRA reinforcement learning on shared GPU boxes.

`lorad.connect()` talks to it from Python, see docs/python.md. What is public is in `__all__`, with types in
`__init__.pyi`, and comes from `lorad.api` when it is first asked for: importing lorad itself costs nothing.
"""

__version__ = "0.1.0"

__all__ = [
    "connect", "connect_async", "Lorad", "AsyncLorad", "Run", "AsyncRun", "Sweep", "AsyncSweep",
    "Table", "Progress", "LoradError", "SpecError", "NotFound", "NotAllowed", "DaemonUnreachable", "Conflict",
    "RunFailed", "NotReached", "TimedOut",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the Python API when one of its names is asked for."""
    if name in __all__:
        import importlib

        value: object = getattr(importlib.import_module("lorad.api"), name)
        return value
    raise AttributeError(f"module 'lorad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
