"""Backend names of engines. Importing this imports no backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lorad.backends.classes import class_behind
from lorad.engines.base import Engine

if TYPE_CHECKING:
    from lorad.engines.remote.dialect import Dialect

BACKENDS = {
    "builtin": "lorad.engines.builtin.engine:BuiltinEngine",
    "sglang": "lorad.engines.sglang.engine:SglangEngine",
    "vllm": "lorad.engines.vllm.engine:VllmEngine",
}
DIALECTS = {
    "sglang": "lorad.engines.sglang.dialect:SglangDialect",
    "vllm": "lorad.engines.vllm.dialect:VllmDialect",
}
SERVERS = frozenset(DIALECTS)  # backends whose engine is a server in a process of its own


def engine_class(name: str, override: str | None = None) -> type[Engine]:
    """Return the class behind a backend name, or behind `override`. Raises SpecError, see `class_behind`."""
    return class_behind(name, override, BACKENDS, Engine, what="engine", key="rollout.backend")


def dialect_class(name: str) -> type[Dialect]:
    """Return the class that speaks with the servers of a backend in SERVERS. It imports no torch."""
    module, _, attribute = DIALECTS[name].partition(":")
    found: type[Dialect] = getattr(importlib.import_module(module), attribute)
    return found
