"""Whether a server is installed, and how to install it. Imports none of it."""

import re
from pathlib import Path

from lorad.box.paths import checkout
from lorad.children.interpreter import NoInterpreter, installed
from lorad.errors import SpecError
from lorad.servers.table import SERVERS

_NVIDIA = Path("/proc/driver/nvidia/version")


def install_lines(backend: str, *, gpu: bool | None = None) -> list[str]:
    """List the commands that install the server of `backend`, then the lines of config.yaml that name it.

    gpu: whether it is for GPUs; None looks whether this machine has one.

    Where the server has no build for CPUs, lorad's source tree has what it lacks there; without the tree
    another server is named.
    """
    kind = SERVERS[backend]
    venv = f"~/venvs/{backend}"
    pip = f"{venv}/bin/python -m pip"
    commands = [f"python3 -m venv {venv}", f"{pip} install --upgrade pip"]
    if _NVIDIA.exists() if gpu is None else gpu:
        commands.append(f"{pip} install '{kind.distributions[0]}>={kind.tried}'")
    elif kind.cpu_steps:
        commands += [f"{pip} {step.format(version=kind.tried)}" for step in kind.cpu_steps]
    elif tree := checkout():
        name = f"LORAD_{backend.upper()}_PYTHON"
        return [
            f"{tree}/.ci/setup-engines {backend}",
            f"# config.yaml, with what it printed as {name}:",
            "backends:",
            f"  {backend}: {{python: ${name}, env: {{PYTHONPATH: {tree}/tests/engines/real/{backend}_cpu}}}}",
        ]
    else:
        other = next(name for name, server in SERVERS.items() if server.cpu_steps)
        return [
            f"# {backend} needs a GPU; without one it runs only from lorad's source tree, which has what it "
            "lacks.",
            f"# On this machine take rollout.backend: {other}, which has a build for CPUs:",
            *install_lines(other, gpu=False),
        ]
    return [*commands, "# config.yaml:", "backends:", f"  {backend}: {{python: {venv}/bin/python}}"]


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
