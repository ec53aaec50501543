"""The audit of a run: from its journal and its sample files alone, whether every batch counts once and every
token is of a version that was attested before anything was trained on it.

It proves of the surviving lineage that its steps are 1 to N, each once; that the batches follow one another
in the data without a gap or a repetition; that the file of a step's samples is the one that was journaled;
and that every sample is of a prompt of the step, has tokens, and was made by a version of this lineage that
had passed its attestation (or was inconclusive with proved delivery) before the step was recorded, no older
than the spec of the attempt allows.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from lorad.bounds import JOURNAL_BYTES, ROW_BYTES, SAMPLES_BYTES, SPEC_BODY_BYTES
from lorad.box.paths import RunDir
from lorad.files import opened_whole, read_file
from lorad.protocol.journal import Record, StepFact, VersionFact, lineage, read
from lorad.spec.text import from_json

_ATTESTED = ("passed", "inconclusive")


class _Maker(Struct, frozen=True):
    """The version that made a step's samples.

    until: the last step whose weights it was.
    """

    version: Record
    until: int


class _AuditedSample(Struct, frozen=True):
    """What the audit reads of a sample."""

    step: int
    version: str
    prompt_id: str
    index: int
    tokens: list[int]


def audit(run_dir: Path, *, spared: bool = False) -> list[str]:
    """List what is wrong with the run, a sentence each; [] when nothing is. Reads all its files. Raises
    OSError.

    spared: some samples were deleted for the disk budget.
    """
    directory = RunDir(run_dir)
    # before the records: a run that works adds some meanwhile
    with opened_whole(directory.journal, JOURNAL_BYTES) as file:
        whole = sum(line.endswith(b"\n") for line in file)
    records = [record for record, _ in read(directory.journal)]
    numbers = [0, *(record.seq for record in records)]
    problems = [
        f"journal: record {number} follows record {before}"
        for before, number in itertools.pairwise(numbers)
        if number != before + 1
    ]
    if whole > len(records):  # a torn last line counts as never written
        count = whole - len(records)
        problems.append(f"journal: {count} lines from line {len(records) + 1} on cannot be read")
    number = 0
    position = 0
    made_by = _makers(records)
    for record in [record for record in lineage(records) if record.kind == "step"]:
        fact = msgspec.convert(record.data, StepFact)
        if record.step != number + 1:
            problems.append(f"step {record.step} follows step {number}")
        if fact.position != position:
            begins = f"its batch begins at prompt {fact.position}, the one before ended at {position}"
            problems.append(f"step {record.step}: {begins}")
        number = record.step
        position = fact.position + (len(fact.prompts) if fact.consumed is None else fact.consumed)
        wrong = _audit_step(directory, record, fact, made_by[record.seq], spared=spared)
        problems += [f"step {record.step}: {problem}" for problem in wrong]
    return problems


def _makers(records: list[Record]) -> dict[int, _Maker | None]:
    """Map the number of each step's record to the version that made its samples."""
    makers: dict[int, _Maker | None] = {}
    versions: dict[int, Record] = {}
    for record in records:
        match record.kind:
            case "version":
                versions[record.data["version"]] = record
            case "rewind":
                last = record.data["to"]
                versions = {number: version for number, version in versions.items() if version.step <= last}
            case "step":
                number = record.data["version"]
                maker = versions.get(number)
                makers[record.seq] = None
                if maker is not None:  # a step without an update has no version of its own
                    later = [version.step for other, version in versions.items() if other > number]
                    until = max(maker.step, min(later, default=record.step) - 1)
                    makers[record.seq] = _Maker(maker, until)
    return makers


def _audit_step(
    directory: RunDir, record: Record, fact: StepFact, made_by: _Maker | None, *, spared: bool
) -> Iterator[str]:
    if not fact.samples:
        return
    name = f"{record.run}@{fact.version}"
    if made_by is None:
        yield f"its samples are of {name}, which no record before it knows"
    own = directory.attempt(record.attempt)
    place = own.work / own.spec.name
    spec = from_json(read_file(place if place.exists() else directory.spec, SPEC_BODY_BYTES))
    if made_by is not None:
        attested = msgspec.convert(made_by.version.data, VersionFact).attested
        if attested not in _ATTESTED:
            yield f"its samples are of {name}, whose attestation is {attested!r}"
        age = record.step - 1 - made_by.until
        allowed = spec.rollout.max_staleness
        if not 0 <= age <= allowed:
            yield f"its samples are of {name}, {age} steps old; {allowed} are allowed"
    path = directory.root / fact.samples
    if not path.exists():
        if not spared:  # where there are as many as `checkpoint.keep_samples`, the others were pruned
            keep = spec.checkpoint.keep_samples
            if not 0 < keep <= sum(1 for _ in directory.samples.glob("*.jsonl")):
                yield f"{fact.samples} is missing"
        return
    with opened_whole(path, SAMPLES_BYTES) as file:
        if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != fact.samples_sha256:
            yield f"{fact.samples} has sha256 {digest}, the journal says {fact.samples_sha256}"
        file.seek(0)
        lines = iter(partial(file.readline, ROW_BYTES), b"")
        yield from _audit_samples(lines, record.step, name, Counter(fact.prompts))


def _audit_samples(lines: Iterable[bytes], step: int, version: str, prompts: Counter[str]) -> Iterator[str]:
    """Check the lines of a step's samples against its record.

    prompts: how often the step has each prompt, by its id.
    """
    sampled: Counter[str] = Counter()
    for place, text in enumerate(lines, 1):
        try:
            line = msgspec.json.decode(text, type=_AuditedSample)
        except msgspec.MsgspecError as error:
            yield f"its samples cannot be read: {error}"
            return
        if (line.step, line.version) != (step, version):
            yield f"sample {place} says step {line.step} and {line.version}, the journal {version}"
        if not line.tokens:
            yield f"sample {place} has no tokens"
        sampled[line.prompt_id] += 1
    group = sampled.total() // max(1, prompts.total())
    if sampled != Counter({prompt: times * group for prompt, times in prompts.items()}):
        yield f"its {sampled.total()} samples are not {group} of each of its {prompts.total()} prompts"
