"""The names of trainers and engines, and the classes behind them. Importing this imports no backend."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lorad.engines.base import Engine
from lorad.errors import SpecError
from lorad.limits.arguments import RANKED
from lorad.servers.table import SERVERS
from lorad.trainers.base import Trainer

ENGINES = {
    "builtin": "lorad.engines.builtin.engine:BuiltinEngine",
    "transformers": "lorad.engines.generic.engine:TransformersEngine",
    **{name: kind.engine for name, kind in SERVERS.items()},
}
TRAINERS = {
    "builtin": "lorad.trainers.builtin.trainer:BuiltinTrainer",
    **dict.fromkeys(RANKED, "lorad.trainers.ranks.remote:RemoteTrainer"),
}


def _class_behind(
    name: str, override: str | None, backends: Mapping[str, str], kind: type[Any], *, what: str, key: str
) -> type[Any]:
    """Import the subclass of `kind` that `backends` has for a name, or that `override` ("module:Class")
    names.

    what: the word for it in errors.
    key: the key of the spec that holds the name.

    Raises SpecError for an unknown name, and for a class that cannot be imported or is no subclass of `kind`.
    """
    if override is None and name not in backends:
        raise SpecError(f"no {what} {name!r}", key=key, hint=f"there is {', '.join(sorted(backends))}")
    place = override or backends[name]
    module, _, attribute = place.partition(":")
    try:
        backend = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "run `lorad doctor`: it says what to install"
        raise SpecError(
            f"{name} is {place}, which can not be imported: {error}", key=key, hint=hint
        ) from error
    if not (isinstance(backend, type) and issubclass(backend, kind)):
        hint = f"name a subclass of {kind.__module__}.{kind.__name__}"
        raise SpecError(f"{place} is no {what}", key=key, hint=hint)
    return backend


if TYPE_CHECKING:
    from lorad.engines.remote.dialect import Dialect


def engine_class(name: str, override: str | None = None) -> type[Engine]:
    """Return the class behind a backend name, or behind `override`. Raises SpecError, see `_class_behind`."""
    return _class_behind(name, override, ENGINES, Engine, what="engine", key="rollout.backend")


def dialect_class(name: str) -> "type[Dialect]":
    """Return the class that speaks with the servers of a backend in SERVERS. It imports no torch."""
    module, _, attribute = SERVERS[name].dialect.partition(":")
    dialect: type[Dialect] = getattr(importlib.import_module(module), attribute)
    return dialect


def trainer_class(name: str, override: str | None = None) -> type[Trainer]:
    """Return the class behind a backend name, or behind `override`. Raises SpecError, see `_class_behind`."""
    return _class_behind(name, override, TRAINERS, Trainer, what="trainer", key="trainer.backend")
