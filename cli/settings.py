"""The configuration of a home, for commands that show something by it."""

from __future__ import annotations

import os

from lorad.box.config import Config, load
from lorad.box.paths import Home


def config_of(home: Home) -> Config:
    """Its config.yaml; the defaults where that is another user's and is not to be read. Raises SpecError."""
    if home.shared_by is not None and home.config.exists() and not os.access(home.config, os.R_OK):
        return Config()
    return load(home.config)
