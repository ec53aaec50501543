"""What another Python has installed, found out without importing any of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ASK_SECONDS = 20.0
ASK = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class NoInterpreter(Exception):
    """The path is no program, or no Python that works; the message says why."""


def installed(python: Path, names: Sequence[str]) -> Mapping[str, str]:
    """Return the version of each distribution that is there beside the interpreter. Raises NoInterpreter."""
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise NoInterpreter("it is no program")
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", ASK, *names],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise NoInterpreter(f"it is no Python that works: {said.rpartition(chr(10))[2]}") from None
    return _answer(done.stdout)


def _answer(printed: str) -> dict[str, str]:
    try:
        found = json.loads(printed.strip().rpartition("\n")[2])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        said = f"printed {printed.strip()[:60]!r}" if printed.strip() else "printed nothing"
        raise NoInterpreter(f"it is no Python: asked what is installed, it {said}")
    return found
