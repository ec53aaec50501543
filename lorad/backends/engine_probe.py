"""Find out whether lorad can use a server here: `python -m lorad.backends.engine_probe KIND [--no-start]`.

Writes JSON on stdout, one object a line: {"note": text} while something takes its time,
{"check": InterpreterFinding}. Exits with 0 when it could say what is the matter, whatever that is.
"""

import argparse
import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from lorad.backends import installed
from lorad.backends.recipes import install_lines
from lorad.box.config import Backend, load
from lorad.box.paths import MEMORY, Home, default_home
from lorad.children.interpreter import InterpreterFinding, Requirements, installation
from lorad.engines.remote.transport import LEAST_FREE
from lorad.errors import LoradError, SpecError
from lorad.servers.table import SERVERS

_EXPECTED = "starting it on the builtin tiny model: half a minute to two minutes, the first time more"
_PACKAGES = ("transformers", "triton", "flashinfer-python", "sglang-kernel")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lorad.backends.engine_probe")
    parser.add_argument("kind", choices=sorted(SERVERS))
    parser.add_argument("--no-start", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, handlers=[_Notes()])

    async def report() -> None:
        async for finding in _findings(arguments.kind, start=not arguments.no_start):
            _write({"check": finding})

    asyncio.run(report())


async def _findings(kind: str, *, start: bool) -> AsyncIterator[InterpreterFinding]:
    """Yield what was found; an engine is only tried when nothing before speaks against it."""
    try:
        backend = load(Home(default_home()).config).backends.get(kind)
    except LoradError as error:
        yield InterpreterFinding("config", False, error.message, error.hint)
        return
    first = _interpreter(kind, backend)
    yield first
    if backend is None or backend.python is None or not first.ok:
        return
    device = "cpu"
    sound = True
    packages = Requirements(_PACKAGES, SERVERS[kind].modules, for_gpus=SERVERS[kind].gpu_modules)
    for finding in installation(backend.python, backend.env, packages, installed.install_hint(kind)):
        sound = sound and finding.ok
        device = "cuda:0" if finding.facts.get("cuda_available") else device
        yield finding
    try:  # adapters travel through memory where they can; where not, nothing is wrong
        free = shutil.disk_usage(MEMORY).free
    except OSError as error:
        yield InterpreterFinding("shm", True, f"{MEMORY}: {error.strerror}; adapters travel through the disk")
    else:
        way = "memory" if free >= LEAST_FREE else "the disk"
        yield InterpreterFinding(
            "shm",
            True,
            f"{free >> 20} MiB free in {MEMORY}; adapters travel through {way}",
            facts={"free": free},
        )
    if not sound:
        return
    from lorad.backends.engine_trial import command, trial

    yield command(kind, backend, device)
    if not start:
        return
    _write({"note": _EXPECTED})
    work = Path(tempfile.mkdtemp(prefix="lr-doctor-"))
    try:
        async for finding in trial(kind, backend, device, work):
            yield finding
    except LoradError as error:
        hint = "Mend what the last lines say. `lorad doctor --json` has the command, to be started by hand."
        yield InterpreterFinding("trial", False, error.message, hint)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Notes(logging.Handler):
    """Writes as notes what the engine logs while it starts."""

    def emit(self, record: logging.LogRecord) -> None:
        _write({"note": record.getMessage()})


def _write(line: object) -> None:
    os.write(1, msgspec.json.encode(line) + b"\n")


def _interpreter(kind: str, backend: Backend | None) -> InterpreterFinding:
    """Say whether the server is installed beside the interpreter that config.yaml names."""
    if backend is None or backend.python is None:
        lines = "\n".join(install_lines(kind))
        return InterpreterFinding(
            "interpreter", False, f"config.yaml names no `python` for {kind}", f"To install it:\n{lines}"
        )
    try:
        version = installed.installed_version(kind, backend.python)
    except SpecError as error:
        return InterpreterFinding("interpreter", False, error.message, error.hint)
    old = installed.is_older(version, kind)
    about = f" (lorad was tried with {SERVERS[kind].tried} and later)" if old else ""
    facts = {"python": str(backend.python), "version": version, "env": sorted(backend.env)}
    words = f"{kind} {version} in {backend.python}{about}"
    return InterpreterFinding("interpreter", not old, words, installed.install_hint(kind), facts)


if __name__ == "__main__":
    main()
