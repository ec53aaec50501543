"""What the pool writes for the ranks of its trainer."""

from __future__ import annotations

import signal
from pathlib import Path

from msgspec import Struct

from lorad.trainers.sharded.body import BodySettings

REFUSAL = "refusal.json"
"""Beside the configuration: why a rank could not begin, as in `lorad.errors.to_wire`."""
DUMP = signal.SIGUSR1
"""Each rank answers it with the stacks of its threads, on stderr."""


class RanksConfig(Struct, frozen=True, kw_only=True):
    """body: `module:function` that makes a `Body` of its settings, whose device each rank takes from
    `devices`. name: of the base, in the configurations of adapters. socket: rank 0 connects to it when all
    ranks are ready. meeting: a file that is not there yet. threads: of each rank.
    """

    python: str
    ranks: int
    body: str
    settings: BodySettings
    devices: tuple[str, ...]
    name: str
    threads: int
    socket: str
    meeting: str


def refusal_file(config: Path) -> Path:
    return config.with_name(REFUSAL)


def beat_file(config: Path, rank: int) -> Path:
    """Return the rank's heartbeat, beside the configuration."""
    return config.with_name(f"rank-{rank}.heartbeat")
