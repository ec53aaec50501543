"""Check by the journal of a run that everything that it wrote is unchanged, with a check for each kind."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lorad.adapters.directory import verify
from lorad.adapters.peft import read_peft
from lorad.bounds import JOURNAL_BYTES, SAMPLES_BYTES
from lorad.box.paths import RunDir
from lorad.daemon.record.audit import audit
from lorad.daemon.storage.prune import age
from lorad.errors import LoradError
from lorad.files import opened_whole
from lorad.models.facts import weights_sha256
from lorad.protocol.journal import Record, decode
from lorad.protocol.pool_setup import Quantize
from lorad.records.daemon import VerificationCheck
from lorad.text import counted

_Findings = tuple[str, list[str]]  # what was looked at, and the problems


@dataclass(frozen=True)
class VerifiedRun:
    """A run as the database has it.

    quantize: the grid that the base was rounded to.
    digests: number of a version -> sha256 of its tensors.
    needed: versions whose files must be there.
    checkpoints: paths of the checkpoints that count.
    works: the run is active, so files may come and go meanwhile.
    spared: samples were deleted for the disk budget.
    """

    directory: RunDir
    model_path: Path
    quantize: Quantize | None
    digests: dict[int, str]
    needed: frozenset[int]
    checkpoints: frozenset[str]
    keep_samples: int
    keep_evals: int
    works: bool
    spared: bool


def check_files(run: VerifiedRun) -> list[VerificationCheck]:
    """Run all checks that ask no process. They read everything and change nothing."""
    journal = run.directory.journal
    lines: list[bytes] = []
    trouble: list[str] = []
    try:
        with opened_whole(journal, JOURNAL_BYTES) as file:
            lines = file.readlines()
    except FileNotFoundError:
        pass  # it has not begun
    except OSError as error:
        trouble = [f"{journal}: {error.strerror}"]
    records = [record for line in lines if (record := decode(line)) is not None]
    checks: Mapping[str, Callable[[], _Findings]] = {
        "base": partial(_check_base, run, records),
        "journal": partial(_check_journal, run, lines, trouble),
        "versions": partial(_check_versions, run, records),
        "checkpoints": partial(_check_checkpoints, run, records),
        "samples": partial(_check_samples, run, records, "step", run.keep_samples),
        "evals": partial(_check_samples, run, records, "eval", run.keep_evals),
        "audit": partial(_check_audit, run),
    }
    timed = []
    for name, check in checks.items():
        started = time.monotonic()
        try:
            looked_at, problems = check()
        except OSError as error:  # such as of a link that its owner put there, to what they may not read
            looked_at = "what could be read"
            problems = [f"{error.filename}: {error.strerror}"]
        timed.append(VerificationCheck(name, looked_at, problems, time.monotonic() - started))
    return timed


def _check_base(run: VerifiedRun, records: list[Record]) -> _Findings:
    """Check that the weight files are those that every attempt trained on."""
    attempts = [record for record in records if record.kind == "attempt" and record.data.get("model_sha256")]
    digests = {record.attempt: record.data["model_sha256"] for record in attempts}
    if not digests:
        return "no attempt recorded its checksum", []
    try:
        sha256 = weights_sha256(run.model_path, run.quantize)
    except (LoradError, OSError) as error:
        return str(run.model_path), [f"{run.model_path}: {error}"]
    weights = f"{run.model_path}: its weights have sha256 {sha256}"
    differing = {attempt: digest for attempt, digest in digests.items() if digest != sha256}
    problems = [f"{weights}, attempt {attempt} trained on {digest}" for attempt, digest in differing.items()]
    return f"{run.model_path}, {counted(len(digests), 'attempt')}", problems


def _check_journal(run: VerifiedRun, lines: list[bytes], trouble: list[str]) -> _Findings:
    """Check that each line has its checksum and no number is left out. A torn last line does not count."""
    problems = [*trouble]
    seq = 0
    for number, line in enumerate(lines, 1):
        record = decode(line)
        if record is None and not line.endswith(b"\n"):
            return f"{counted(number - 1, 'record')} and a torn last line", problems
        if record is None:
            problems.append(f"{run.directory.journal}:{number}: damaged")
        elif record.seq != seq + 1:
            problems.append(f"{run.directory.journal}:{number}: record {record.seq} follows record {seq}")
        seq = record.seq if record else seq + 1
    return counted(len(lines), "record"), problems


def _check_versions(run: VerifiedRun, records: list[Record]) -> _Findings:
    """Check that files are as written, and tensors have the digest that was attested."""
    facts = {record.data["version"]: record.data for record in records if record.kind == "version"}
    problems: list[str] = []
    pruned = 0
    for number, fact in facts.items():
        path = run.directory.root / fact["path"]
        sha256 = fact["sha256"]
        if run.digests.get(number, sha256) != sha256:
            problems.append(f"version {number}: the database has sha256 {run.digests[number]}, not {sha256}")
        if path.is_dir():
            problems += _check_directory(path, sha256)
        elif number in run.needed:
            problems.append(f"{path}: missing, and somebody needs it")
        else:
            pruned += 1
    return _with_pruned(len(facts), "version", pruned), problems


def _check_directory(path: Path, sha256: str | None = None) -> list[str]:
    """Check the files of a version or checkpoint, and its tensors if their digest is known."""
    try:
        verify(path)
        digest = None if sha256 is None else read_peft(path).digest()
    except (LoradError, OSError) as error:
        return [str(error)] if path.is_dir() else []
    if digest != sha256:
        return [f"{path}: its tensors have sha256 {digest}, the journal says {sha256}"]
    return []


def _check_checkpoints(run: VerifiedRun, records: list[Record]) -> _Findings:
    facts = {record.data["path"] for record in records if record.kind == "checkpoint"}
    problems: list[str] = []
    pruned = 0
    for path in (run.directory.root / relative for relative in sorted(facts)):
        if path.is_dir():
            problems += _check_directory(path)
        elif str(path) in run.checkpoints and not run.works:
            problems.append(f"{path}: missing")
        else:
            pruned += 1
    return _with_pruned(len(facts), "checkpoint", pruned), problems


def _check_samples(run: VerifiedRun, records: list[Record], kind: str, keep: int) -> _Findings:
    """Check the samples of steps or evaluations. The oldest are pruned first: what is missing between others
    was taken away.
    """
    data = [record.data for record in records if record.kind == kind and record.data.get("samples")]
    digests = {run.directory.root / fact["samples"]: fact["samples_sha256"] for fact in data}
    oldest = min((age(path) for path in digests if path.exists()), default=None)
    problems = []
    pruned = 0
    for path, sha256 in digests.items():
        try:
            with opened_whole(path, SAMPLES_BYTES) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            pruned += 1
            if not keep or oldest is None or (age(path) > oldest and not run.works):
                problems.append(f"{path}: missing")
            continue
        if digest != sha256:
            problems.append(f"{path}: changed bytes: sha256 {digest}, the journal says {sha256}")
    return _with_pruned(len(digests), "file", pruned), problems


def _check_audit(run: VerifiedRun) -> _Findings:
    """Check that every batch counts once and every token is of an attested version, by `audit.py`."""
    if not run.directory.journal.exists():
        return "nothing: it has not begun", []
    problems = audit(run.directory.root, spared=run.spared)
    return "steps, batches and the version of each token", problems


def _with_pruned(count: int, noun: str, pruned: int) -> str:
    return counted(count, noun) + (f", {pruned} of them pruned" if pruned else "")
