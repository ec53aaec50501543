"""The audit of a run: it finds nothing in one that went well, and whatever was changed since."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.daemon.record.audit import audit
from lorad.protocol.journal import encode, read
from tests.kit.world import World, world


@pytest.fixture(scope="module")
def trained() -> Iterator[World]:
    with world() as made:
        made.run("a", "trainer.steps=3")
        yield made


def samples(directory: Path) -> Path:
    return sorted((directory / "samples").iterdir())[1]


def change(directory: Path, kind: str, **changes: Any) -> None:
    """Rewrite a value of the second record of a kind, as anybody who can compute a checksum could."""
    path = directory / "journal.jsonl"
    records = [record for record, _ in read(path)]
    place = [number for number, record in enumerate(records) if record.kind == kind][1]
    records[place] = msgspec.structs.replace(records[place], data=records[place].data | changes)
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
    "step 2: its samples are of a@7, which no record before it knows": lambda at: change(
        at, "step", version=7
    ),
    "samples are not 4 of each of its 4 prompts": lambda at: change(at, "step", prompts=["x", "y", "z", "w"]),
    "lines from line": lambda at: (at / "journal.jsonl").write_text(
        (at / "journal.jsonl").read_text() + "{}\n"
    ),
}


@pytest.mark.parametrize("found", DAMAGE)
def test_the_audit_of_a_run_finds(found: str, trained: World, tmp_path: Path) -> None:
    directory = tmp_path / "a"
    shutil.copytree(trained.client.show("a").directory, directory)
    assert audit(directory) == []
    DAMAGE[found](directory)
    assert any(found in exception for exception in audit(directory)), audit(directory)


def test_what_a_run_adds_while_it_is_audited_is_no_exception(
    trained: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "a"
    shutil.copytree(trained.client.show("a").directory, directory)

    def grown(path: Path) -> list[Any]:
        found = list(read(path))
        with path.open("ab") as journal:
            journal.write(encode(msgspec.structs.replace(found[-1][0], seq=found[-1][0].seq + 1)))
        return found

    monkeypatch.setattr("lorad.daemon.record.audit.read", grown)
    assert audit(directory) == []
