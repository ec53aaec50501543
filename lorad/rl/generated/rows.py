"""Rows of `reasoning_gym:TASK`, made in an interpreter that has the package: as many and the same each time.

Item i of a dataset with seed s is that of seed s + i (reasoning-gym 0.1.25), so that a dataset with another
seed is not held out. Here the split follows from the prompt, as with builtin tasks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from lorad.errors import SpecError
from lorad.files import expanded
from lorad.rl.sources import Row
from lorad.rl.tasks import split_of
from lorad.spec.data import GENERATED, Data

_SIZE = 4096  # rows, of all splits together, where args has no size
_SECONDS = 600.0
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")
_REFUSED = 3  # the exit code of the child that says why


def generated_rows(source: str, split: str, data: Data, cwd: Path) -> Iterator[Row]:
    """Yield the rows of a split. Raises SpecError for a wrong interpreter, task or argument."""
    python = str((cwd / expanded(data.python)).absolute()) if data.python else sys.executable
    args = json.dumps({"size": _SIZE, "seed": 0} | data.args, sort_keys=True)
    for number, line in enumerate(_printed(source.removeprefix(GENERATED), args, python), 1):
        values = json.loads(line)
        if split_of(values["prompt"]) == split:
            yield Row(number, f"{source}:{number}", values)


@lru_cache(maxsize=4)
def _printed(task: str, args: str, python: str) -> tuple[str, ...]:
    command = [python, "-I", str(Path(__file__).with_name("child.py")), task, args]
    env = {name: os.environ[name] for name in _PASSED if name in os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=env | {"MPLBACKEND": "agg"}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = "Name an interpreter, such as ~/venvs/gym/bin/python."
        raise SpecError(f"{python} made no rows: {error}", key="data.python", hint=hint) from None
    lines = done.stdout.splitlines()
    if done.returncode == _REFUSED and lines:
        said: dict[str, Any] = json.loads(lines[-1])
        raise SpecError(said["error"], key="data.train", hint=said["hint"])
    if done.returncode:
        problem = f"{python} made no rows: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
        raise SpecError(problem, key="data.train", hint="Does `import reasoning_gym` work there?")
    return tuple(lines)
