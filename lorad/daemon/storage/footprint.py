"""The bytes that a run's versions and checkpoints take on disk: at most, and now."""

import contextlib
import shutil
from functools import lru_cache
from pathlib import Path

from msgspec import MsgspecError
from msgspec.structs import replace

from lorad.daemon.context import request_of
from lorad.daemon.state import bytes_of
from lorad.daemon.storage.prune import VERSION, key_of, listed
from lorad.errors import LoradError
from lorad.protocol.preflight import SpecFacts
from lorad.records.runs import KeptFiles
from lorad.spec.model import Spec
from lorad.spec.text import from_json
from lorad.store.rows import RunRow
from lorad.text import size

_NUMBER = 4  # bytes of a number in fp32, which files hold
_OF_SLOT = 3  # a weight and two moments of Adam
_OF_TENSOR = 256  # bytes that a file says of a tensor
_BESIDE = 2 << 10  # bytes of the manifest and of the configuration
_STATES = 16 << 10  # bytes of the states of random numbers and of the loop


def footprint(spec: Spec, facts: SpecFacts, place: Path) -> KeptFiles:
    """Count what `checkpoint` of the spec keeps at most; samples and logs are not counted.

    place: a directory of the disk where the files will be.
    """
    kept = spec.checkpoint
    steps = spec.trainer.steps
    written = -(-steps // kept.every) + kept.keep_best
    checkpoints = min(written, kept.keep + kept.keep_best) if kept.keep else written
    versions = at_once = steps + 1
    if kept.keep_versions:
        versions = min(steps + 1, kept.keep_versions + checkpoints)
        at_once = min(steps + 1, versions + kept.every)
    tensors = 2 * _OF_TENSOR * len(facts.modules)
    version = _NUMBER * facts.adapter_parameters + tensors + _BESIDE
    numbers = _OF_SLOT * (facts.adapter_parameters + facts.critic_parameters)
    checkpoint = _NUMBER * numbers + _OF_SLOT * tensors + _BESIDE + _STATES
    total = at_once * version + checkpoints * checkpoint
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(place).free
    return KeptFiles(versions, at_once, version, checkpoints, checkpoint, total, free)


def short_of_disk(files: KeptFiles) -> list[str]:
    """Warn of a disk that is too small, in a sentence; [] where it is large enough."""
    if files.free is None or files.total <= files.free:
        return []
    return [
        f"its versions and checkpoints may come to {size(files.total)}, and {size(files.free)} are free: "
        "lower checkpoint.keep_versions and checkpoint.keep, or free some space"
    ]


def files_of(run: RunRow) -> KeptFiles | None:
    """Say what a run keeps at most, and what it has on disk; None where its parameters were never counted,
    and for tinker runs, whose client decides what is kept.
    """
    try:
        facts = request_of(run).facts
        spec = from_json(run.spec.encode())
    except (LoradError, MsgspecError):
        return None
    if not facts.adapter_parameters or spec.algorithm.kind == "tinker":
        return None
    versions, of_versions = _count(run.dir.versions)
    checkpoints, of_checkpoints = _count(run.dir.checkpoints)
    return replace(
        footprint(spec, facts, run.dir.root),
        present_versions=versions,
        present_checkpoints=checkpoints,
        present=of_versions + of_checkpoints,
    )


def _count(parent: Path) -> tuple[int, int]:
    """Count the versions or checkpoints in a directory, and their bytes."""
    try:
        return _measure(parent, parent.stat().st_mtime_ns)
    except OSError:
        return 0, 0


@lru_cache(maxsize=512)
def _measure(parent: Path, _mtime_ns: int) -> tuple[int, int]:
    """Measure once for as long as nothing comes or goes there: versions and checkpoints never change."""
    paths = [path for path in listed(parent) if VERSION.fullmatch(path.name) or key_of(path)]
    return len(paths), bytes_of(paths)
