"""A file that is written whole: others find all of it, or what was there before."""

import os
from pathlib import Path

import pytest

from lorad.files import expanded, opened_whole, remove_tree, write_whole


def test_a_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    write_whole(path, b"after", mode=0o644)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", 0o644)
    assert os.listdir(tmp_path) == ["a"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_whole(path, b"before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a"]
    write_whole(path, b"after", durable=False)
    assert path.read_text() == "after"


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / ".a.tmp").symlink_to(elsewhere)
    write_whole(tmp_path / "a", b"data")
    assert not elsewhere.exists() and not (tmp_path / "a").is_symlink()


def test_deep_trees_are_removed(tmp_path: Path) -> None:
    """Deeper than Python calls itself, and with a path that is longer than any may be."""
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("x" * 60, dir_fd=here)
        above, here = here, os.open("x" * 60, os.O_RDONLY, dir_fd=here)
        os.close(above)
    os.close(here)
    remove_tree(tmp_path)
    assert not tmp_path.exists()


def test_holes_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 40)
    for limit, words in ((1 << 41, "sparse"), (1 << 30, "larger than")):
        with pytest.raises(OSError, match=words), opened_whole(tmp_path / "hole", limit):
            pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe, not a file"), opened_whole(tmp_path / "pipe", 9):
        pass


def test_a_home_of_nobody_is_refused() -> None:
    assert expanded("~/a") == Path.home() / "a"
    with pytest.raises(FileNotFoundError, match="~nosuch is no user's home") as refused:
        expanded("~nosuch/a")
    assert refused.value.filename == "~nosuch/a"
