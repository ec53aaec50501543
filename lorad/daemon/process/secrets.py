"""Secrets that the processes of runs find in their environment, and that are stored nowhere else.

`secrets` in config.yaml names a file for each variable. The command of a process (`command.json`) names the
files again; the shim reads them just before it starts the program.
"""

from __future__ import annotations

from lorad.box.config import Config
from lorad.daemon.process.shim import read_secret
from lorad.errors import SpecError


def secret_files(config: Config) -> dict[str, str]:
    """Variable -> file, for `command.json`."""
    return {name: str(path) for name, path in config.secrets.items()}


def secrets_of(config: Config) -> dict[str, str]:
    """Read the configured secrets: variable -> value, for a process that needs no shim.

    Raises SpecError, whose message does not contain the secret.
    """
    found = {}
    for name, path in config.secrets.items():
        try:
            found[name] = read_secret(str(path))
        except OSError as error:
            told = f"secrets of config.yaml: {name}: {path}: {error.strerror}"
            raise SpecError(told, hint=f"It holds the value alone: chmod 600 {path}, and chown it.") from None
    return found
