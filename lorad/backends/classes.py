"""The classes behind the names of backends."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from lorad.errors import SpecError


def class_behind(
    name: str, override: str | None, backends: Mapping[str, str], kind: type[Any], *, what: str, key: str
) -> type[Any]:
    """Import the subclass of `kind` that `backends` has for a name, or that `override` ("module:Class")
    names.

    what: the word for it in errors.
    key: the key of the spec that holds the name.

    Raises SpecError for a name that is not known, and for a class that cannot be imported or is no subclass
    of `kind`.
    """
    if override is None and name not in backends:
        raise SpecError(f"no {what} {name!r}", key=key, hint=f"there is {', '.join(sorted(backends))}")
    place = override or backends[name]
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "run `lorad doctor`: it says what to install"
        raise SpecError(
            f"{name} is {place}, which can not be imported: {error}", key=key, hint=hint
        ) from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        hint = f"name a subclass of {kind.__module__}.{kind.__name__}"
        raise SpecError(f"{place} is no {what}", key=key, hint=hint)
    return found
