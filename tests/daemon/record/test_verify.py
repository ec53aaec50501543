"""`lorad verify` and its audit: whatever byte is broken or record changed is found and named; what is whole
or pruned is no problem.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.client.client import Client
from lorad.daemon.record.audit import audit
from lorad.daemon.storage.prune import prune
from lorad.errors import IntegrityError, NotFound, SpecError, StorageError
from lorad.protocol.journal import decode, encode, read
from lorad.records.daemon import VerificationCheck
from lorad.states import Move
from lorad.store import runs
from tests.kit.daemon_world import Api, behave, finished, serving, submit
from tests.kit.fakes.daemon_fakes import FACTS
from tests.kit.world import SMALL, World, world

HELD = ["resources.group=held"]


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        it.run("a", "trainer.steps=2", "checkpoint.every=1", text=SMALL)
        yield it


def problems(made: World) -> dict[str, list[str]]:
    """Map each check that found problems to them; assert that the directory is unchanged."""
    answer = made.client.verify("a")
    found = {check.check: check.problems for check in answer.checks if check.problems}
    assert answer.problems == sum(map(len, found.values()))
    return found


def flip(path: Path, where: int = -3) -> Callable[[], None]:
    """Change a byte: what undoes it."""
    before = path.read_bytes()
    data = bytearray(before)
    data[where] ^= 1
    path.write_bytes(data)

    def undo() -> None:
        path.write_bytes(before)

    return undo


def test_whole_run_passes_all_checks_with_counts(made: World) -> None:
    told = made.lorad("verify", "a").stdout
    assert [line[:2] for line in told.splitlines()] == ["\N{CHECK MARK} "] * 8
    for part in ("1 attempt", "3 versions", "2 checkpoints", "2 files"):
        assert part in told
    assert re.search(r"\d versions? loaded now", told)  # the engine unloads them when it likes


@pytest.mark.parametrize(
    ("check", "file"),
    [
        ("versions", "versions/000001/adapter_model.safetensors"),
        ("versions", "versions/000002/adapter_config.json"),
        ("checkpoints", "checkpoints/000002-a1/state.json"),
        ("samples", "samples/000001-a1.jsonl"),
        ("journal", "journal.jsonl"),
    ],
)
def test_changed_byte_is_found_with_its_file(made: World, check: str, file: str) -> None:
    undo = flip(made.home.run("a").root / file)
    try:
        found = problems(made)
        assert any(file in problem for problem in found.pop(check))
        assert set(found) <= {"audit"}  # which reads samples and journal as well
        told = made.lorad("verify", "a", expect=1).stdout
        assert f"\N{BALLOT X} {check}" in told and file in told
    finally:
        undo()
    assert problems(made) == {}


def test_replaced_tensors_are_found_though_their_manifest_fits(made: World) -> None:
    versions = made.home.run("a").versions
    shutil.copytree(versions, made.root / "copy")
    try:
        shutil.rmtree(versions / "000001")
        shutil.copytree(versions / "000002", versions / "000001")
        (problem,) = problems(made)["versions"]
        assert "000001: its tensors have sha256" in problem
    finally:
        shutil.rmtree(versions)
        (made.root / "copy").rename(versions)


def test_missing_records_and_files_are_told(made: World) -> None:
    run = made.home.run("a")
    lines = run.journal.read_bytes().splitlines(keepends=True)
    whole, samples = run.journal.read_bytes(), (run.samples / "000002-a1.jsonl").read_bytes()
    try:
        run.journal.write_bytes(b"".join(line for number, line in enumerate(lines) if number != 3))
        (run.samples / "000002-a1.jsonl").unlink()
        found = problems(made)
        assert "journal.jsonl:4: record 5 follows record 3" in found["journal"][0]
        assert "000002-a1.jsonl: missing" in found["samples"][0]
    finally:
        run.journal.write_bytes(whole)
        (run.samples / "000002-a1.jsonl").write_bytes(samples)


def test_another_base_is_found(made: World) -> None:
    run = made.home.run("a")
    whole = run.journal.read_bytes()
    first, *rest = whole.splitlines(keepends=True)
    record = decode(first)
    assert record is not None and record.kind == "attempt"
    record.data["model_sha256"] = "0" * 64
    try:
        run.journal.write_bytes(b"".join([encode(record), *rest]))
        assert "attempt 1 trained on 0000" in problems(made)["base"][0]
    finally:
        run.journal.write_bytes(whole)


@pytest.mark.system
def test_pipes_in_place_of_files_hold_up_nobody(made: World) -> None:
    """Opening one waits for somebody who writes into it: the daemon opens none, for no request."""
    run = made.home.run("a")
    places = [run.version(2), run.checkpoint(2, 1), run.samples, run.attempt(1).work / "spec.json"]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.iterdir()))]
    assert len(files) > 8
    client = Client(made.home, timeout=60)
    client.limit_group("held", 0)  # forks need not run
    for number, file in enumerate(path for path in files if path.is_file()):
        aside = file.rename(made.root / "aside")
        os.mkfifo(file)
        try:
            assert client.verify("a").problems or file.name in ("spec.json", "rng.safetensors")
            for fresh in (False,) if file.parent == run.checkpoint(2, 1) else (True, False):
                with contextlib.suppress(IntegrityError, StorageError, SpecError, NotFound):
                    client.fork("a@2", name=f"f{number}-{fresh}", overrides=HELD, steps=3, fresh=fresh)
            assert client.show("a").state == "ended"
        finally:
            aside.rename(file)


async def checks(api: Api) -> dict[str, VerificationCheck]:
    return {check.check: check for check in (await api("verify", "a")).checks}


async def test_missing_files_are_problems_unless_pruned(home: Path) -> None:
    behave(home, pool={"refuses": ["a@1005"]})
    async with serving(home) as api:
        prune(
            api.ctx,
            finished(api.ctx, checkpoint={"every": 2, "keep": 1, "keep_versions": 2, "keep_samples": 2}),
        )
        found = await checks(api)
        assert found["versions"].looked_at == "6 versions, 4 of them pruned"
        assert found["checkpoints"].looked_at == "3 checkpoints, 2 of them pruned"
        assert [found[name].problems for name in ("versions", "checkpoints", "samples")] == [[], [], []]
        await api("pin", "a@1005")
        run = api.ctx.home.run("a")
        shutil.rmtree(run.version(1005))
        shutil.rmtree(run.checkpoint(6, 1))
        found = await checks(api)
        assert "001005: missing, and somebody needs it" in found["versions"].problems[0]
        assert "000006-a1: missing" in found["checkpoints"].problems[0]


async def test_wrong_loaded_version_is_found(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("serving", "a@1005")
        behave(home, pool={"refuses": ["a@1005"]})
        attested = (await checks(api))["attestation"]
        assert attested.looked_at == "1 version loaded now"
        assert "a@1005 in pool tiny-1: a@1005 is not what it should be" in attested.problems[0]


async def test_unstarted_run_has_nothing_to_check(home: Path) -> None:
    async with serving(home) as api:
        submit(api.ctx, "a", FACTS["model_path"])
        runs.move(api.ctx.store, "a", Move.PAUSE)
        assert (await api("verify", "a")).problems == 0


async def test_torn_last_journal_line_is_no_problem(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with (home / "runs" / "a" / "journal.jsonl").open("ab") as journal:
            journal.write(b'{"v":1,"seq":')
        found = (await checks(api))["journal"]
        assert found.problems == [] and "torn last line" in found.looked_at


def samples(directory: Path) -> Path:
    return sorted((directory / "samples").iterdir())[1]


def change(directory: Path, kind: str, step: int | None = None, **changes: Any) -> None:
    """Rewrite a value of the second record of a kind, as anybody who can compute a checksum could."""
    path = directory / "journal.jsonl"
    records = [record for record, _ in read(path)]
    place = [number for number, record in enumerate(records) if record.kind == kind][1]
    record = records[place]
    records[place] = msgspec.structs.replace(record, step=step or record.step, data=record.data | changes)
    path.write_bytes(b"".join(encode(record) for record in records))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "step 2: samples/000002-a1.jsonl has sha256": lambda at: samples(at).write_text(
        samples(at).read_text() + "{}"
    ),
    "step 2: samples/000002-a1.jsonl is missing": lambda at: samples(at).unlink(),
    "its batch begins at prompt 5, the one before ended at 4": lambda at: change(at, "step", position=5),
    "its samples are of a@1, whose attestation is 'failed'": lambda at: change(
        at, "version", attested="failed"
    ),
    "step 2: its samples are of a@0, 1 steps old; 0 are allowed": lambda at: change(at, "step", version=0),
    "step 1: its samples are of a@1, -1 steps old; 0 are allowed": lambda at: change(at, "step", step=1),
    "step 2: its samples are of a@7, which no record before it knows": lambda at: change(
        at, "step", version=7
    ),
    "samples are not 4 of each of its 4 prompts": lambda at: change(at, "step", prompts=["x", "y", "z", "w"]),
    "lines from line": lambda at: (at / "journal.jsonl").write_text(
        (at / "journal.jsonl").read_text() + "{}\n"
    ),
}


@pytest.mark.parametrize("found", DAMAGE)
def test_the_audit_of_a_run_finds(found: str, made: World, tmp_path: Path) -> None:
    directory = tmp_path / "a"
    shutil.copytree(made.client.show("a").directory, directory)
    assert audit(directory) == []
    DAMAGE[found](directory)
    assert any(found in exception for exception in audit(directory)), audit(directory)


def test_audit_ignores_records_added_meanwhile(
    made: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "a"
    shutil.copytree(made.client.show("a").directory, directory)

    def grown(path: Path) -> list[Any]:
        found = list(read(path))
        with path.open("ab") as journal:
            journal.write(encode(msgspec.structs.replace(found[-1][0], seq=found[-1][0].seq + 1)))
        return found

    monkeypatch.setattr("lorad.daemon.record.audit.read", grown)
    assert audit(directory) == []
