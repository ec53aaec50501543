"""Backend names of trainers. Importing this imports no backend."""

from __future__ import annotations

from lorad.backends.classes import class_behind
from lorad.trainers.base import Trainer

BACKENDS = {
    "builtin": "lorad.trainers.builtin.trainer:BuiltinTrainer",
    "fsdp": "lorad.trainers.ranks.remote:RemoteTrainer",
    "megatron": "lorad.trainers.ranks.remote:RemoteTrainer",
}
RANKED = frozenset({"fsdp", "megatron"})  # backends whose trainer is made of processes of its own


def trainer_class(name: str, override: str | None = None) -> type[Trainer]:
    """Return the class behind a backend name, or behind `override`. Raises SpecError, see `class_behind`."""
    return class_behind(name, override, BACKENDS, Trainer, what="trainer", key="trainer.backend")
