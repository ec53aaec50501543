"""The command lines of every process that the daemon starts (tests replace them), and the secrets in its
environment.

Secrets are stored nowhere else: `secrets` in config.yaml names a file for each variable, `command.json` of a
process names the files again, and the shim reads them just before it starts the program. In a shared daemon
each process has the secrets of its user, who alone reads them (`enter.py`).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lorad.box.config import Config
from lorad.box.paths import Home, python_path
from lorad.box.runtime import Runtime
from lorad.daemon.process.enter import OWN_SECRETS
from lorad.daemon.process.shim import read_secret
from lorad.daemon.process.users import User
from lorad.errors import SpecError

_LIGHT = Runtime(threads=1)  # drivers and preflights compute nothing


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", name)  # -P: nothing in the working directory shadows a module


@dataclass(frozen=True)
class Commands:
    """How to start each process. Its directory follows the command; preflight and completer read standard
    input.

    driver, lane: followed by its attempt's directory; a lane is the driver of a model of Tinker's client.
    pool: followed by the pool's directory.
    trial: followed by its attempt's directory, and a number of samples.
    services: what starts a service instead of its own program, by its name.
    """

    driver: tuple[str, ...] = _module("lorad.driver")
    pool: tuple[str, ...] = _module("lorad.pool")
    preflight: tuple[str, ...] = _module("lorad.preflight")
    trial: tuple[str, ...] = _module("lorad.driver.trial")
    completer: tuple[str, ...] = _module("lorad.daemon.serving.completer")
    lane: tuple[str, ...] = _module("lorad.tinker.lane")
    services: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def service(self, name: str) -> tuple[str, ...]:
        """Return what starts the program of a service; what follows is in `lorad/daemon/services`."""
        return self.services.get(name) or _module(f"lorad.{name}")

    def environment(
        self, home: Home, *, runtime: Runtime = _LIGHT, pythonpath: str | None = None
    ) -> dict[str, str]:
        """Make the variables that are added to the daemon's own environment."""
        return {
            "LORAD_HOME": str(home.root),
            "PYTHONPATH": python_path(pythonpath, os.environ.get("PYTHONPATH")),
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8:backslashreplace",  # what user code prints ends in logs, in any locale
            "TOKENIZERS_PARALLELISM": "false",
            **runtime.environment(),
        }

    def asked_as(
        self, user: User | None, argv: Sequence[str], home: Home
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command and the whole environment of a process without a shim.

        user: whose process it is to be; None: the daemon's own.
        """
        if user is None:
            return list(argv), {**os.environ, **self.environment(home)}
        return user.command(argv, Path("/")), {**user.environment, **self.environment(home)}


def own_secrets(user: User | None) -> dict[str, str]:
    """Return what is added to the environment of a user's process that is to have that user's own secrets."""
    return {} if user is None else {OWN_SECRETS: "1"}


def secrets_of(config: Config, user: User | None) -> dict[str, str]:
    """Read the value of each secret variable, for a process without a shim. A user's process reads the user's
    own.

    Raises SpecError, whose message does not contain the secret.
    """
    if user is not None:
        return own_secrets(user)
    secrets = {}
    for name, path in config.secrets.items():
        try:
            secrets[name] = read_secret(str(path))
        except OSError as error:
            problem = f"secrets of config.yaml: {name}: {path}: {error.strerror}"
            hint = f"It holds the value alone: chmod 600 {path}, and chown it."
            raise SpecError(problem, hint=hint) from None
    return secrets
