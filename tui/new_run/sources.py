"""Reads the spec that a new run starts from (a template, a file, another run), and writes that of a form."""

import contextlib
import os
import shlex
import stat
from pathlib import Path

from lorad.bounds import SPEC_BYTES
from lorad.errors import Conflict, SpecError, StorageError
from lorad.files import read_file, write_whole
from lorad.records.runs import RunDetails
from lorad.spec.templates import TEMPLATES
from lorad.spec.text import mapping
from lorad.text import size
from lorad.tui.draft import DraftSource, relative
from lorad.tui.spec_fields import ALWAYS_WRITTEN
from lorad.tui.spec_lines import differing, flat, nested

FILE = "run.yaml"  # what `lorad init` writes to
_OFFERED = 50  # files of a directory that are offered


def cwd() -> Path:
    """Return the working directory, or (it may be gone) the home."""
    try:
        return Path.cwd()
    except OSError:
        return Path.home()


def of_template(name: str) -> DraftSource:
    template = TEMPLATES[name]
    init = f"lorad init {FILE}" if name == next(iter(TEMPLATES)) else f"lorad init {FILE} --template {name}"
    values = flat(mapping(template.filled(), source=name))
    return DraftSource(f"template {name}", values, cwd(), command=f"{init} && lorad run {FILE}")


def of_file(path: Path) -> DraftSource:
    """Read a file. Raises SpecError with the line to blame, also for what cannot be read."""
    path = absolute(str(path))
    try:
        text = read_file(path, SPEC_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{path}: {reason}", hint="`lorad init` writes a spec to start from.") from None
    values = flat(mapping(text, source=path.name))
    short = str(path.relative_to(cwd())) if path.is_relative_to(cwd()) else str(path)
    return DraftSource(path.name, values, path.parent, command=f"lorad run {shlex.quote(short)}")


def of_run(run: RunDetails) -> DraftSource:
    """Begin like a run, as `Client.show` has it: what differs from the defaults, and what a run is."""
    spec = flat(run.spec)
    values = {key: value for key, value in spec.items() if key in ALWAYS_WRITTEN} | differing(spec)
    values.pop("name", None)
    notes = []
    if run.cwd is None and (lost := relative(values)):
        notes.append(f"Where its paths began is not known: {', '.join(lost)} begin here now.")
    if run.origin:
        notes.append(
            f"It continued from {run.origin}; this one starts from scratch. Fork a version to continue."
        )
    return DraftSource(f"run {run.name}", flat(nested(values)), Path(run.cwd or cwd()), note=" ".join(notes))


def specs_here() -> list[str]:
    """List the YAML files of the working directory."""
    with contextlib.suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(cwd()) if entry.name.endswith((".yaml", ".yml")))
        return names[:_OFFERED]
    return []


def absolute(typed: str) -> Path:
    return Path(typed.strip()).expanduser().absolute()


def lost_by_writing(path: Path) -> str:
    """Describe what writing would replace; "" if nothing is there. Raises Conflict if it is not a file."""
    try:
        facts = path.stat()
    except OSError:
        return ""
    if not stat.S_ISREG(facts.st_mode):
        raise Conflict(f"{path} is no file", hint="Name one that is, or a new one.")
    return f"It is there, {size(facts.st_size)}; what it says now is lost, its comments too."


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises StorageError."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", hint="Choose another place.") from None
