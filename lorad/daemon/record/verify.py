"""Check that everything that a run wrote is unchanged: one check for each kind of thing, by the run's
journal.
"""

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
    checks: Mapping[str, Callable[[], VerificationCheck]] = {
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
            done = check()
        except OSError as error:  # as of a link that its owner put there, to what they may not read
            done = VerificationCheck(name, "what could be read", [f"{error.filename}: {error.strerror}"])
        seconds = time.monotonic() - started
        timed.append(VerificationCheck(done.check, done.looked_at, done.problems, seconds))
    return timed


def _check_base(run: VerifiedRun, records: list[Record]) -> VerificationCheck:
    """Check that the weight files are those that every attempt trained on."""
    digests = {
        r.attempt: r.data["model_sha256"]
        for r in records
        if r.kind == "attempt" and r.data.get("model_sha256")
    }
    if not digests:
        return VerificationCheck("base", "no attempt recorded its checksum", [])
    try:
        sha256 = weights_sha256(run.model_path, run.quantize)
    except (LoradError, OSError) as error:
        return VerificationCheck("base", str(run.model_path), [f"{run.model_path}: {error}"])
    wrong = [
        f"{run.model_path}: its weights have sha256 {sha256}, attempt {attempt} trained on {digest}"
        for attempt, digest in digests.items()
        if digest != sha256
    ]
    return VerificationCheck("base", f"{run.model_path}, {counted(len(digests), 'attempt')}", wrong)


def _check_journal(run: VerifiedRun, lines: list[bytes], trouble: list[str]) -> VerificationCheck:
    """Check that each line has its checksum and no number is left out. A torn last line does not count."""
    problems = [*trouble]
    seq = 0
    for number, line in enumerate(lines, 1):
        record = decode(line)
        if record is None and not line.endswith(b"\n"):
            return VerificationCheck(
                "journal", f"{counted(number - 1, 'record')} and a torn last line", problems
            )
        if record is None:
            problems.append(f"{run.directory.journal}:{number}: damaged")
        elif record.seq != seq + 1:
            problems.append(f"{run.directory.journal}:{number}: record {record.seq} follows record {seq}")
        seq = record.seq if record else seq + 1
    return VerificationCheck("journal", counted(len(lines), "record"), problems)


def _check_versions(run: VerifiedRun, records: list[Record]) -> VerificationCheck:
    """Check that files are as written, and tensors have the digest that was attested."""
    facts = {record.data["version"]: record.data for record in records if record.kind == "version"}
    problems: list[str] = []
    gone = 0
    for number, fact in facts.items():
        path = run.directory.root / fact["path"]
        if run.digests.get(number, fact["sha256"]) != fact["sha256"]:
            problems.append(
                f"version {number}: the database has sha256 {run.digests[number]}, not {fact['sha256']}"
            )
        if path.is_dir():
            problems += _wrong_files(path) or _wrong_tensors(path, fact["sha256"])
        elif number in run.needed:
            problems.append(f"{path}: missing, and somebody needs it")
        else:
            gone += 1
    return VerificationCheck("versions", _without(counted(len(facts), "version"), gone), problems)


def _wrong_files(path: Path) -> list[str]:
    try:
        verify(path)
    except (LoradError, OSError) as error:
        return [str(error)] if path.is_dir() else []  # pruned just now
    return []


def _wrong_tensors(path: Path, sha256: str) -> list[str]:
    try:
        digest = read_peft(path).digest()
    except LoradError as error:
        return [error.message] if path.is_dir() else []
    return (
        [] if digest == sha256 else [f"{path}: its tensors have sha256 {digest}, the journal says {sha256}"]
    )


def _check_checkpoints(run: VerifiedRun, records: list[Record]) -> VerificationCheck:
    facts = {record.data["path"] for record in records if record.kind == "checkpoint"}
    problems: list[str] = []
    gone = 0
    for relative in sorted(facts):
        path = run.directory.root / relative
        if path.is_dir():
            problems += _wrong_files(path)
        elif str(path) in run.checkpoints and not run.works:
            problems.append(f"{path}: missing")
        else:
            gone += 1
    return VerificationCheck("checkpoints", _without(counted(len(facts), "checkpoint"), gone), problems)


def _check_samples(run: VerifiedRun, records: list[Record], kind: str, keep: int) -> VerificationCheck:
    """Check the samples of steps or evaluations. The oldest are pruned first: what is missing between others
    was taken away.
    """
    facts = {
        record.data["samples"]: record.data["samples_sha256"]
        for record in records
        if record.kind == kind and record.data.get("samples")
    }
    paths = {run.directory.root / relative: sha256 for relative, sha256 in facts.items()}
    oldest = min((age(path) for path in paths if path.exists()), default=None)
    problems = []
    gone = 0
    for path, sha256 in paths.items():
        try:
            with opened_whole(path, SAMPLES_BYTES) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            gone += 1
            if not keep or oldest is None or (age(path) > oldest and not run.works):
                problems.append(f"{path}: missing")
            continue
        if digest != sha256:
            problems.append(f"{path}: changed bytes: sha256 {digest}, the journal says {sha256}")
    what = "samples" if kind == "step" else "evals"
    return VerificationCheck(what, _without(counted(len(paths), "file"), gone), problems)


def _check_audit(run: VerifiedRun) -> VerificationCheck:
    """Check that every batch counts once and every token is of an attested version, by `audit.py`."""
    looked_at = "steps, batches and the version of each token"
    if not run.directory.journal.exists():
        return VerificationCheck("audit", "nothing: it has not begun", [])
    return VerificationCheck("audit", looked_at, audit(run.directory.root, spared=run.spared))


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _without(count: str, gone: int) -> str:
    return f"{count}, {gone} of them pruned" if gone else count
