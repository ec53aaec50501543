"""An archive of another box is unpacked as a version, or not at all."""

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorad.client.archive import fetch_version
from lorad.errors import DaemonUnreachable, IntegrityError, LoradError


def _archive(*members: tarfile.TarInfo, cut: int = 0) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return data.getvalue()[: -cut or None]


def _member(name: str, size: int = 4, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    member.type = kind
    member.linkname = "/etc/passwd"
    return member


def _fetch(data: bytes, target: Path) -> Any:
    answer = SimpleNamespace(file=io.BytesIO(data), headers={"x-lorad-exported": "a@1 0"})
    return fetch_version(SimpleNamespace(request=lambda *_: answer), "a@1", str(target))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "member",
    [
        _member("../escaped"),
        _member("/tmp/escaped"),
        _member("a/../../escaped"),
        _member("link", 0, tarfile.SYMTYPE),
        _member("hard", 0, tarfile.LNKTYPE),
        _member("device", 0, tarfile.CHRTYPE),
        _member("pipe", 0, tarfile.FIFOTYPE),
    ],
    ids=lambda member: member.name,
)
def test_strange_members_are_refused(member: tarfile.TarInfo, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="which no version has"):
        _fetch(_archive(_member("good"), member), tmp_path / "inner/out")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_cut_archive_leaves_nothing(tmp_path: Path) -> None:
    data = _archive(_member("weights", 100_000), cut=60_000)
    with pytest.raises(DaemonUnreachable, match="broke off"):
        _fetch(data, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_changed_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError):
        _fetch(_archive(_member("manifest.json"), _member("weights")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_doubled_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoradError):
        _fetch(_archive(_member("weights"), _member("weights")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
