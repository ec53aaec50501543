"""What the builtin engine holds of a version: its frozen copy on the device."""

from __future__ import annotations

from dataclasses import dataclass

from lorad.engines.versions import Held
from lorad.models.lora import FrozenLora


@dataclass(eq=False)
class HeldLora(Held):
    """`lora` is None for the base."""

    lora: FrozenLora | None = None

    def __post_init__(self) -> None:
        self.bytes = self.lora.nbytes() if self.lora else 0

    @property
    def identity(self) -> str:
        """Equal for versions that compute the same: the digest is of the tensors alone."""
        return f"{self.digest} x {self.lora.scale if self.lora else 0}"
