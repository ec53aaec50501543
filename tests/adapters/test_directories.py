"""Version and checkpoint directories: whole or not there, immutable, every byte accounted for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lorad.adapters.directory import MANIFEST, begin, commit, read_manifest, sweep, verify, write_directory
from lorad.errors import Conflict, IntegrityError, StorageError


def two_files(directory: Path) -> None:
    (directory / "weights").write_bytes(bytes(range(100)))
    (directory / "state").mkdir()
    (directory / "state" / "adam").write_bytes(b"")


@pytest.fixture
def final(tmp_path: Path) -> Path:
    write_directory(tmp_path / "versions" / "000001", two_files, {"step": 3})
    return tmp_path / "versions" / "000001"


def test_written_directory_has_files_and_their_manifest(final: Path) -> None:
    manifest = read_manifest(final)
    assert {name: fact.bytes for name, fact in manifest.files.items()} == {"state/adam": 0, "weights": 100}
    assert manifest.facts == {"step": 3}
    assert manifest.bytes == 100
    assert [path.name for path in final.parent.iterdir()] == ["000001"]
    verify(final)


def test_directory_can_be_begun_and_committed_apart(tmp_path: Path) -> None:
    temporary = begin(tmp_path / "000002")
    assert temporary.parent == tmp_path and temporary.name.startswith(".tmp-000002-")
    two_files(temporary)
    commit(temporary, tmp_path / "000002")
    verify(tmp_path / "000002")
    assert not temporary.exists()


def test_an_existing_directory_is_never_replaced(final: Path) -> None:
    with pytest.raises(Conflict, match="000001"):
        write_directory(final, two_files)
    temporary = begin(final.with_name("2"))
    with pytest.raises(Conflict):
        commit(temporary, final)
    verify(final)


def test_everything_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        there = "" if (tmp_path / "v").exists() else "before "
        synced.append(there + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).partition("-")[0])
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_directory(tmp_path / "v", two_files)
    assert sorted(synced[:-2]) == sorted(f"before {name}" for name in ("weights", "state", "adam", MANIFEST))
    assert synced[-2:] == ["before .tmp", tmp_path.name.partition("-")[0]]


def test_full_disk_error_names_directory_and_leaves_nothing(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        two_files(directory)
        Path("/dev/full").write_bytes(b"x")

    with pytest.raises(StorageError, match="the disk is full") as told:
        write_directory(tmp_path / "v", fill)
    assert str(tmp_path / "v") in str(told.value) and "lorad rm" in told.value.hint
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/v could not be written"):
        write_directory(tmp_path / "file" / "v", two_files)


def test_any_failure_of_the_writer_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        two_files(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_directory(tmp_path / "v", fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["weights", "state/adam", MANIFEST])
def test_missing_file_is_named(name: str, final: Path) -> None:
    (final / name).unlink()
    with pytest.raises(IntegrityError, match=name):
        verify(final)


def test_flipped_byte_names_its_file(final: Path) -> None:
    for name in ("weights", MANIFEST):
        whole = (final / name).read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 0x40
            (final / name).write_bytes(damaged)
            with pytest.raises(IntegrityError, match=name):
                verify(final)
        (final / name).write_bytes(whole)
    verify(final)


def test_unknown_and_longer_files_fail_verification(final: Path) -> None:
    (final / "state" / "more").touch()
    with pytest.raises(IntegrityError, match="state/more: not in"):
        verify(final)
    (final / "state" / "more").unlink()
    (final / "weights").write_bytes(bytes(101))
    with pytest.raises(IntegrityError, match="101 bytes instead of 100"):
        verify(final)


def test_link_fails_verification(final: Path) -> None:
    (final / "weights").rename(final.parent / "elsewhere")
    (final / "weights").symlink_to(final.parent / "elsewhere")
    with pytest.raises(IntegrityError, match="weights: neither a file"):
        verify(final)


def test_sweep_removes_what_a_killed_writer_left(
    tmp_path: Path,
) -> None:
    """The writer is killed at each of its fsyncs in turn; only the last but one makes the final name."""
    code = """
import os, sys
from pathlib import Path
from lorad.adapters.directory import write_directory
left, real = int(sys.argv[2]), os.fsync
def fsync(descriptor):
    global left
    if not left: os._exit(9)
    left -= 1
    real(descriptor)
os.fsync = fsync
write_directory(Path(sys.argv[1]), lambda d: [(d / n).write_text(n) for n in "abc"] and None)
"""
    for survived in range(6):
        final = tmp_path / str(survived)
        done = subprocess.run(
            [sys.executable, "-c", code, str(final), str(survived)], cwd=Path(__file__).parents[2]
        )
        assert done.returncode == 9
        assert final.exists() == (survived == 5)  # only the parent's fsync was missing
    assert len(sweep(tmp_path)) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    verify(tmp_path / "5")
