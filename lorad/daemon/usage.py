"""What is known of the disk."""

from __future__ import annotations

from dataclasses import dataclass, field

LOOK_SECONDS = 60.0


@dataclass
class Disk:
    """used: bytes of the home and its storage, None before the first look; told: that it is too much, "" when not."""

    used: int | None = None
    measured_at: float = field(default_factory=lambda: -LOOK_SECONDS)
    is_measuring: bool = False
    told: str = ""
