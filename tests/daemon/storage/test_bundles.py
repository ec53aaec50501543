"""Bundles that clients send: whole or not at all, by their sha256, below their directory, not too many."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from lorad.bounds import BUNDLE_FILES, BUNDLES
from lorad.daemon.storage.bundles import take_in
from lorad.errors import Conflict, LoradError, SpecError, StorageError
from lorad.records.requests import BundleRequest

GOOD = b'[["a/b.jsonl",3],["c",2]]\n123de'


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _send(place: Path, data: bytes, sha256: str = "") -> Path:
    answer = take_in(place, sha256 or _sha(data), BundleRequest(len(data), 0, data))
    return Path(answer.directory)


def test_files_come_in_parts(tmp_path: Path) -> None:
    name = _sha(GOOD)
    assert take_in(tmp_path, name, BundleRequest(len(GOOD))).received == 0
    assert take_in(tmp_path, name, BundleRequest(len(GOOD), 0, GOOD[:9])).received == 9
    assert take_in(tmp_path, name, BundleRequest(len(GOOD), 0, GOOD[:9])).received == 9  # it came twice
    assert take_in(tmp_path, name, BundleRequest(len(GOOD), 20, b"x")).received == 9
    assert take_in(tmp_path, name, BundleRequest(len(GOOD), 9, b"x" * 99)).received == 9
    answer = take_in(tmp_path, name, BundleRequest(len(GOOD), 9, GOOD[9:]))
    place = Path(answer.directory)
    assert place == tmp_path / name and [path.name for path in tmp_path.iterdir()] == [name]
    assert (place / "a/b.jsonl").read_bytes() == b"123" and (place / "c").read_bytes() == b"de"
    os.utime(place, (0, 0))
    assert take_in(tmp_path, name, BundleRequest(len(GOOD))).directory == answer.directory
    assert place.stat().st_mtime > 0  # it is as young as a new one


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="another sha256"):
        _send(tmp_path, GOOD, "0" * 64)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "head",
    [
        [["../escaped", 1]], [["/tmp/escaped", 1]], [["a/../../escaped", 1]], [["", 1]], [[".", 1]],
        [["..", 1]],
        [["a//b", 1]], [["a/", 1]], [["./a", 1]], [["a\0b", 1]], [["a" * 5000, 1]], [["a/" * 3000 + "a", 1]],
        [["a", -1], ["b", 2]], [["a", 2]], [["a", 0]], [["a", 2**63]], [["a", 10**30]], [["a", 1.5]], [],
        [["a", 1], ["a", 1]], {"a": 1}, [["a"]], "a", [[1, 1]], [["a", 1, 1]], [["\ud800", 1]],
        [["a" * 300, 1]], [["a", 0], ["a/b", 1]], [[f"{n}", 0] for n in range(BUNDLE_FILES)] + [["a", 1]],
    ],
    ids=lambda head: repr(head)[:30],
)  # fmt: skip
def test_hostile_bundles_leave_nothing(head: object, tmp_path: Path) -> None:
    place = tmp_path / "inner"
    place.mkdir()
    with pytest.raises((SpecError, StorageError)):
        _send(place, json.dumps(head).encode() + b"\nx")
    assert [path for path in tmp_path.rglob("*") if path != place] == []


@pytest.mark.parametrize("data", [b"\n", b"[" * 100_000, b"\xff\n", b"x" * 2_000_000])
def test_what_is_no_bundle_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(LoradError):
        _send(tmp_path, data)
    assert list(tmp_path.iterdir()) == []


def test_nothing_in_place_of_a_part_is_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("")
    place = tmp_path / "inner"
    place.mkdir()
    part = place / f".part-{_sha(GOOD)}"
    part.symlink_to(secret)
    with pytest.raises(StorageError):
        _send(place, b"" + GOOD)
    assert secret.read_text() == ""
    part.unlink(missing_ok=True)
    os.mkfifo(part)
    with pytest.raises(StorageError):
        _send(place, GOOD)


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    for number in range(BUNDLES):
        (tmp_path / f".part-{number}").touch()
    with pytest.raises(Conflict, match="you have 64 bundles") as refused:
        _send(tmp_path, GOOD)
    assert "`lorad gc`" in refused.value.hint
    (tmp_path / ".part-0").unlink()
    assert _send(tmp_path, GOOD).is_dir()
