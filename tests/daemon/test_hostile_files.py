"""What another user may put where a shared daemon reads: it is refused, and nothing is read or written as
root.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lorad.box.paths import RunDir
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.user_files import files_into, own_directory, own_file, refuse_strange_journal
from lorad.daemon.process.users import user_of
from lorad.errors import IntegrityError
from lorad.protocol.journal import Record
from lorad.store.facts import _mistake
from tests.kit.world import REPOSITORY

ALICE, BOB = 4001, 4002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes files of other users")


@needs_root
@pytest.mark.parametrize("trick", ["link", "other", "names"])
def test_only_the_owners_own_journal_is_read(tmp_path: Path, trick: str) -> None:
    run, user = RunDir(tmp_path), user_of(ALICE)
    own_file(run.journal, user)
    refuse_strange_journal(run, user)
    if trick == "link":
        run.journal.unlink()
        run.journal.symlink_to("/etc/passwd")
    elif trick == "other":
        os.chown(run.journal, BOB, BOB)
    else:
        os.link(run.journal, tmp_path / "another")
    with pytest.raises(IntegrityError):
        refuse_strange_journal(run, user)


@pytest.mark.parametrize(
    "path", ["../x", "/etc", "versions/..", "versions/a/b", "samples/1", "versions/.hidden", 3, None]
)
def test_path_outside_its_directory_is_refused(path: object) -> None:
    fact = {"version": 1, "path": path}
    assert _mistake(Record(1, 1, "a", 1, 1, "version", 1.0, fact))
    assert not _mistake(Record(1, 1, "a", 1, 1, "version", 1.0, fact | {"path": "versions/000001"}))


@pytest.mark.parametrize("number", [-2, 2**60, 1.5, "1", [1]])
def test_a_number_that_names_no_row_is_refused(number: object) -> None:
    assert _mistake(Record(1, 1, "a", 1, 1, "version", 1.0, {"version": number, "path": "versions/000001"}))
    assert _mistake(Record(1, 1, "a", 10**9, 1, "end", 1.0, {}))
    assert _mistake(Record(1, 1, "a", 1, 1, "end", 1.0e300, {}))


def test_manifest_naming_outside_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="manifest"):
        files_into(tmp_path, tmp_path / "to", ["../x"], None, None)


@needs_root
def test_thread_has_user_rights_only_while_acting(home: Path) -> None:
    home.chmod(0o711)
    secret = home / "secret"
    secret.write_text("of root")
    secret.chmod(0o600)
    own_directory(home / "theirs", user_of(ALICE))
    with as_user(user_of(ALICE)):
        with pytest.raises(PermissionError):
            secret.read_text()
        (home / "theirs" / "new").write_text("")
        with pytest.raises(RuntimeError), as_user(user_of(BOB)):
            pass
    assert (secret.read_text(), (home / "theirs" / "new").stat().st_uid) == ("of root", ALICE)


@needs_root
def test_what_a_shared_daemon_lacks_is_told_exactly(home: Path) -> None:
    done = subprocess.run(
        ["setpriv", "--bounding-set=-chown", sys.executable, "-m", "lorad.daemon", "--system"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
    )
    assert (done.returncode, "lacks CAP_CHOWN" in done.stderr) == (4, True), done.stderr
    assert not any(home.iterdir())
