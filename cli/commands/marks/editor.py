"""Open what a queued run asks for in the user's editor, and find what was changed there."""

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from lorad.cli.points import dotted
from lorad.errors import Conflict, LoradError, SpecError
from lorad.records.runs import RunDetails
from lorad.spec.text import mapping

_HEAD = """\
# What the queued run {name} asks for. Save and leave: what differs is checked and set, all of it or nothing.
# A line that is gone stays as it was. To change nothing, leave as it is.
"""
_REST = """
# What it trains stays. For another training: `lorad kill {name}`, and `lorad run … --replace`.
"""


def write_draft(run: RunDetails) -> Path:
    """Write a private file for the editor: the keys that may change, and the others as comments.

    Raises Conflict for a run that waits no more.
    """
    import yaml

    if run.state != "queued":
        hint = f"`lorad resume {run.name} key=value` changes keys from its next attempt on."
        raise Conflict(f"run {run.name} is {run.state}, and only a queued run can be edited", hint=hint)
    part = {"resources": run.spec["resources"]}
    if not run.attempt:
        part["trainer"] = {"steps": run.spec["trainer"]["steps"]}
    rest = yaml.safe_dump(run.spec, sort_keys=False, allow_unicode=True)
    text = _HEAD.format(name=run.name) + yaml.safe_dump(part, sort_keys=False, allow_unicode=True)
    text += _REST.format(name=run.name) + "".join(f"#   {line}\n" for line in rest.splitlines())
    number, path = tempfile.mkstemp(prefix=f"lorad-{run.name}-", suffix=".yaml")
    with os.fdopen(number, "w") as file:
        file.write(text)
    return Path(path)


def read_edits(path: Path, run: RunDetails) -> list[str]:
    """Wait until the editor ($VISUAL, $EDITOR, vi) ends; return `key=value` for what differs.

    Raises SpecError for a text that is no YAML, and LoradError for an editor that cannot be started or fails.
    """
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        done = subprocess.run([*shlex.split(command), str(path)])
    except (OSError, ValueError) as error:
        hint = "Set EDITOR to one that is installed, or `lorad edit RUN resources.priority=2`."
        raise LoradError(f"the editor {command} cannot be started: {error}", hint=hint) from None
    if done.returncode:
        hint = "Nothing was changed."
        raise LoradError(f"the editor {command} ended with {done.returncode}", hint=hint)
    try:
        after = mapping(path.read_text(), source=str(path))
    except UnicodeDecodeError:
        raise SpecError(f"{path}: not UTF-8 text", hint="Save it as UTF-8.") from None
    before = dict(dotted(run.spec))
    return [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in dotted(after)
        if key not in before or before[key] != value
    ]
