"""Backend names of trainers. Importing this imports no backend."""

from __future__ import annotations

import importlib

from lorad.errors import SpecError
from lorad.trainers.base import Trainer

BACKENDS = {
    "builtin": "lorad.trainers.builtin.trainer:BuiltinTrainer",
    "fsdp": "lorad.trainers.ranks.remote:RemoteTrainer",
    "megatron": "lorad.trainers.ranks.remote:RemoteTrainer",
}
RANKED = frozenset({"fsdp", "megatron"})  # backends whose trainer is made of processes of its own


def trainer_class(name: str, override: str | None = None) -> type[Trainer]:
    """Return the class behind a backend name, or behind `override` ("module:Class").

    Raises SpecError for a name that is not known and for a class that can not be imported or is no Trainer.
    """
    if override is None and name not in BACKENDS:
        raise SpecError(f"no trainer {name!r}", key="trainer.backend", hint=f"there is {', '.join(sorted(BACKENDS))}")
    place = override or BACKENDS[name]
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"{name} is {place}, which can not be imported: {error}",
            key="trainer.backend",
            hint="run `lorad doctor`: it says what to install",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise SpecError(
            f"{place} is no trainer", key="trainer.backend", hint="name a subclass of lorad.trainers.base.Trainer"
        )
    return found
