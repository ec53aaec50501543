"""Backend names of engines. Importing this imports no backend."""

from __future__ import annotations

import importlib

from lorad.engines.base import Engine
from lorad.errors import SpecError

BACKENDS = {"builtin": "lorad.engines.builtin.engine:BuiltinEngine"}


def engine_class(name: str, override: str | None = None) -> type[Engine]:
    """The class behind a backend name, or behind `override` ("module:Class").

    Raises SpecError for a name that is not known and for a class that can not be imported or is no Engine.
    """
    if override is None and name not in BACKENDS:
        raise SpecError(f"rollout.backend: no engine {name!r}", hint=f"there is {', '.join(sorted(BACKENDS))}")
    place = override or BACKENDS[name]
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"rollout.backend: {name} is {place}, which can not be imported: {error}",
            hint="run `lorad doctor`: it says what to install",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise SpecError(f"rollout.backend: {place} is no engine", hint="name a subclass of lorad.engines.base.Engine")
    return found
