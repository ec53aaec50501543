"""What `lorad doctor` last said of each backend, in a file of the home."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lorad.box.paths import Home
from lorad.children.interpreter import InterpreterFinding
from lorad.files import write_whole


class _LastProbe(msgspec.Struct, frozen=True):
    """The last look at one backend.

    Attributes:
        python: the interpreter that was looked at.
        at: seconds since 1970.
        failed: names of the checks that failed.
        device: what its torch is for: `cpu` or `cu`; "" where that was not seen.
    """

    python: str
    at: float
    failed: list[str]
    device: str = ""


def _file(home: Home) -> Path:
    return home.root / "probes.json"


def last_probes(home: Home) -> dict[str, _LastProbe]:
    """Return the last look at each backend, by its name; empty where there was none."""
    try:
        return msgspec.json.decode(_file(home).read_bytes(), type=dict[str, _LastProbe])
    except (OSError, msgspec.DecodeError):
        return {}


def keep_probe(home: Home, kind: str, findings: Sequence[InterpreterFinding]) -> None:
    """Keep what was found of a backend, unless no interpreter was looked at or the home takes no files."""
    python = findings[0].facts.get("python") if findings else None
    if home.shared_by is not None or python is None or not home.root.is_dir():
        return
    facts = {name: value for finding in findings for name, value in finding.facts.items()}
    device = ("cu" if facts["torch_cuda"] else "cpu") if "torch_cuda" in facts else ""
    failed = [finding.name for finding in findings if not finding.ok]
    probe = _LastProbe(python, time.time(), failed, device)
    write_whole(_file(home), msgspec.json.encode(last_probes(home) | {kind: probe}), durable=False)
