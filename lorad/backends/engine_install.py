"""Whether a server is installed, and how to install it. Imports none of it."""

import re
from pathlib import Path

from lorad.backends.recipes import install_lines
from lorad.children.interpreter import NoInterpreter, installed
from lorad.errors import SpecError
from lorad.servers.table import SERVERS


def install_hint(backend: str) -> str:
    lines = "\n".join(f"    {line}" for line in install_lines(backend))
    return f"If {backend} is not installed yet, then in a shell, and in config.yaml of lorad's home:\n{lines}"


def installed_version(backend: str, python: Path) -> str:
    """Return the version of the server beside the interpreter `python`. Raises SpecError that says how to
    install it.
    """
    names = SERVERS[backend].distributions
    try:
        versions = installed(python, names)
    except NoInterpreter as error:
        raise SpecError(
            f"{python}, for {backend}: {error}", key="rollout.backend", hint=install_hint(backend)
        ) from None
    if not versions:
        raise SpecError(
            f"{backend} is not installed beside {python}", key="rollout.backend", hint=install_hint(backend)
        )
    return next(versions[name] for name in names if name in versions)


def is_older(version: str, backend: str) -> bool:
    """Return whether a version is older than the oldest that lorad was tried with."""
    return _numbers(version) < _numbers(SERVERS[backend].tried)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
