"""The command lines of every process that the daemon starts: one place, replaced by tests."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from lorad.box.paths import Home, python_path
from lorad.box.runtime import Runtime

LIGHT = Runtime(threads=1)  # drivers and preflights compute nothing


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", name)  # -P: nothing in the working directory shadows a module


@dataclass(frozen=True)
class Commands:
    """How to start each process. Its directory follows the command, and the preflight reads standard input.

    driver: followed by its attempt's directory.
    pool: followed by the pool's directory.
    gateway: followed by the home.
    """

    driver: tuple[str, ...] = _module("lorad.driver")
    pool: tuple[str, ...] = _module("lorad.pool")
    preflight: tuple[str, ...] = _module("lorad.preflight")
    gateway: tuple[str, ...] = _module("lorad.gateway")

    def environment(
        self, home: Home, *, runtime: Runtime = LIGHT, pythonpath: str | None = None
    ) -> dict[str, str]:
        """Make the variables that are added to the daemon's own environment."""
        return {
            "LORAD_HOME": str(home.root),
            "PYTHONPATH": python_path(pythonpath, os.environ.get("PYTHONPATH")),
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **runtime.environment(),
        }
