"""What only its owner may read: keys and tokens."""

import os
from pathlib import Path

import pytest

from lorad.box.private import read_key, read_private
from lorad.errors import SpecError

STRANGER = 4001


def written(path: Path, mode: int = 0o600) -> Path:
    path.write_text("s3cret\n")
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o601])
def test_what_others_may_use_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=rf"readable by others \(mode {mode:04o}\)"):
        read_private(written(tmp_path / "key", mode), 100)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "key")
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(SpecError, match=f"belongs to user {STRANGER}"):
        read_private(path, 100)


def test_links_are_followed_unless_refused(tmp_path: Path) -> None:
    written(tmp_path / "key")
    (tmp_path / "link").symlink_to("key")
    assert read_private(tmp_path / "link", 100) == b"s3cret\n"
    with pytest.raises(OSError, match="a link"):
        read_private(tmp_path / "link", 100, links=False)


def test_more_than_a_key_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_private(written(tmp_path / "key"), 3)


def test_a_pipe_instead_of_a_key_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(SpecError, match="a pipe, not a file"):
        read_key(str(tmp_path / "key"))


def test_a_key_without_a_home_is_refused() -> None:
    with pytest.raises(SpecError, match="is no user's home"):
        read_key("~nosuch-user/key")
