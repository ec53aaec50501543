"""Backend names of engines. Importing this imports no backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lorad.engines.base import Engine
from lorad.errors import SpecError

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
    """Return the class behind a backend name, or behind `override` ("module:Class").

    Raises SpecError for a name that is not known and for a class that can not be imported or is no Engine.
    """
    if override is None and name not in BACKENDS:
        raise SpecError(f"no engine {name!r}", key="rollout.backend", hint=f"there is {', '.join(sorted(BACKENDS))}")
    place = override or BACKENDS[name]
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"{name} is {place}, which can not be imported: {error}",
            key="rollout.backend",
            hint="run `lorad doctor`: it says what to install",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise SpecError(
            f"{place} is no engine", key="rollout.backend", hint="name a subclass of lorad.engines.base.Engine"
        )
    return found


def dialect_class(name: str) -> type[Dialect]:
    """Return the class that speaks with the servers of a backend in SERVERS. It imports no torch."""
    module, _, attribute = DIALECTS[name].partition(":")
    found: type[Dialect] = getattr(importlib.import_module(module), attribute)
    return found
