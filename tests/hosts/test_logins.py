"""Who logs in as another user than the daemon's is that user for it: a real one, made for the test."""

import contextlib
import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from lorad.protocol.listener import answers
from tests.hosts.conftest import Box, box_by, sshd_on_loopback
from tests.kit.passable import PASSABLE, why_not
from tests.kit.warm.processes import CLIENT as WARM
from tests.kit.world import COLD, REPOSITORY

pytestmark = pytest.mark.system
SPEC = """
algorithm: {group_size: 2}
data: {train: sort, prompts_per_step: 2}
trainer: {steps: 100000}
rollout: {max_new_tokens: 4}
eval: {every: 0}
"""


@contextlib.contextmanager
def user_of_this_machine() -> Iterator[pwd.struct_passwd]:
    """Make a user with a home, who goes again with all files and processes."""
    name = f"lorad-t{os.getpid()}"
    subprocess.run(["useradd", "--create-home", "--password", "*", name], check=True, capture_output=True)
    try:
        yield pwd.getpwnam(name)
    finally:
        subprocess.run(["userdel", "--remove", "--force", name], check=True, capture_output=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Box, pwd.struct_passwd]]:
    """A box with a shared daemon of root's, which is reached as another user."""
    if (reason := why_not()) or shutil.which("useradd") is None:
        pytest.skip(reason or "this machine has no useradd")
    with (
        user_of_this_machine() as user,
        sshd_on_loopback(user.pw_name, around=PASSABLE) as options,
        box_by(options, COLD) as box,
    ):
        for directory in (box.far.root, box.here):
            directory.chmod(0o711)
        box.far.home.root.mkdir()
        daemon = subprocess.Popen(
            [*PASSABLE, *WARM, "-m", "lorad.daemon", "--system"],
            env=os.environ | {"LORAD_HOME": str(box.far.home.root)},
            cwd=REPOSITORY,
        )
        try:
            box.far.until(lambda: daemon.poll() is not None or answers(box.far.home.socket), "a daemon")
            yield box, user
        finally:
            daemon.terminate()
            daemon.wait()
            box.close()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process.uids().real == user.pw_uid:
                        process.kill()
                        process.wait()


def test_the_daemon_sees_the_login(shared: tuple[Box, pwd.struct_passwd]) -> None:
    box, user = shared
    (box.here / "work/spec.yaml").write_text(SPEC)
    run = json.loads(box.there("run", "spec.yaml", "--name", "theirs", "--detach", "--json").stdout)
    assert run["owner"] == user.pw_name
    box.far.reached("theirs", 1)
    uids = {
        process.role: psutil.Process(process.pid).uids().real
        for process in box.far.client.show("theirs").processes
        if process.pid and not process.role.endswith("shim")
    }
    assert uids == {"driver": user.pw_uid, "pool": user.pw_uid}
    assert box.far.home.run("theirs").journal.stat().st_uid == user.pw_uid
    box.there("kill", "theirs")


def test_sent_files_are_of_the_login(shared: tuple[Box, pwd.struct_passwd]) -> None:
    box, user = shared
    work = box.here / "work"
    (work / "rows.jsonl").write_text('{"prompt": "S:21=", "answer": "12"}\n' * 4)
    (work / "sent.yaml").write_text(SPEC.replace("train: sort", "train: rows.jsonl"))
    box.lorad("--host", "h2", "--send", "check", "sent.yaml")
    bundles = box.far.home.root / "bundles"
    (place,) = bundles.glob("*/*")
    assert place.parent.name == str(user.pw_uid) and (place / "rows.jsonl").exists()
    assert {path.stat().st_uid for path in bundles.rglob("*")} == {user.pw_uid}
    assert {path.stat().st_mode & 0o077 for path in bundles.rglob("*")} == {0}
    assert bundles.stat().st_uid == 0 and bundles.stat().st_mode & 0o777 == 0o711
    os.utime(place, (0, 0))
    assert str(place) in box.there("gc", "--json").stdout and not place.exists()


def test_others_runs_are_refused(shared: tuple[Box, pwd.struct_passwd]) -> None:
    box, user = shared
    box.far.client.limit_group("held", 0)
    held = ["resources.group=held"]  # it need not work
    box.far.client.run(SPEC, source="a.yaml", cwd="/", overrides=held, name="roots")
    for words in (("kill", "roots"), ("stop", "roots"), ("rename", "roots", "mine")):
        refused = box.there(*words, expect=4)
        assert "roots" in refused.stderr and user.pw_name in refused.stderr
    assert "admin" in box.there("daemon", "stop", expect=4).stderr
    box.far.client.kill("roots")
    assert box.far.client.status().pid
