"""A daemon that several users share: whose processes and files there are, and what nobody gets by tricks with
files.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lorad.box.paths import RunDir
from lorad.protocol.journal import JournalWriter, VersionFact, read
from lorad.protocol.listener import answers
from tests.driver.episodes.test_door import TEMPLATE
from tests.engines.real.places import TINY
from tests.kit.callers import CallerOf
from tests.kit.leftovers import kill_leftovers
from tests.kit.passable import PASSABLE, why_not
from tests.kit.warm.processes import CLIENT as WARM
from tests.kit.world import COLD, REPOSITORY, SMALL

pytestmark = pytest.mark.system

ALICE, BOB = 4001, 4002
CLOSED = {0o700, 0o600}
ASK = """
import pathlib, sys, lorad.client.transport
gateway = lorad.client.transport.Transport(pathlib.Path(sys.argv[1]), 60)
print(gateway.ask("POST", "/v1/completions", {"model": "bot", "prompt": "S:21=", "max_tokens": 4}))
"""


@pytest.fixture(scope="module", autouse=True)
def users() -> None:
    if reason := why_not():
        pytest.skip(reason)


class Box:
    """A machine with a shared daemon, and the processes of two users who ask it.

    python: how the daemon's interpreter is called. What a fork of the warm process starts is forked, too.
    """

    def __init__(self, root: Path, python: Sequence[str] = WARM) -> None:
        self.python = python
        self.home = root / "lorad"
        self.home.mkdir(exist_ok=True)
        self.callers = {uid: CallerOf(uid, self.home) for uid in (ALICE, BOB)}
        self.homes = {uid: root / str(uid) for uid in self.callers}
        for uid, home in self.homes.items():
            home.mkdir(mode=0o700)
            os.chown(home, uid, uid)
        self.daemon = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        daemon = subprocess.Popen(
            [*PASSABLE, *self.python, "-m", "lorad.daemon", "--system"],
            env=os.environ | {"LORAD_HOME": str(self.home), "SECRET_OF_ROOT": "1"},
            cwd=REPOSITORY,
        )
        while not answers(self.home / "lorad.sock"):  # it is there a little sooner than somebody listens
            assert daemon.poll() is None
            time.sleep(0.02)
        return daemon

    def replace(self, python: Sequence[str], *victims: int) -> None:
        """Kill the daemon and these processes, and start a daemon anew: all others live on."""
        self.daemon.kill()
        self.daemon.wait()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        (self.home / "lorad.sock").unlink()
        self.python = python
        self.daemon = self.start()

    def ask(self, uid: int, method: str, path: str, body: Any = None, *, expect: int = 200) -> Any:
        status, answer = self.callers[uid].ask(method, f"/v1/{path}", body)
        assert status == expect, answer
        return answer

    def run(
        self, uid: int, name: str, *overrides: str, spec: str = SMALL, cwd: str = "/", expect: int = 200
    ) -> Any:
        body = {"spec": spec, "source": "a.yaml", "cwd": cwd, "overrides": [*overrides], "name": name}
        return self.ask(uid, "POST", "runs", body, expect=expect)

    def over(self, name: str) -> Any:
        deadline = time.monotonic() + 120
        while (shown := self.ask(ALICE, "GET", f"runs/{name}"))["state"] not in ("ended", "paused"):
            assert time.monotonic() < deadline, shown
            time.sleep(0.05)
        return shown

    def close(self) -> None:
        self.daemon.terminate()
        self.daemon.wait()
        for caller in self.callers.values():
            caller.close()
        kill_leftovers(self.home)


@contextlib.contextmanager
def boxed(python: Sequence[str] = WARM) -> Iterator[Box]:
    """A machine that is gone afterwards."""
    root = Path(tempfile.mkdtemp(prefix="lr-"))
    root.chmod(0o711)
    made = Box(root, python)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    """Start a shared daemon with an ended run `a` of Alice's."""
    with boxed() as made:
        made.run(ALICE, "a", "trainer.steps=4")
        assert made.over("a")["reason"] == "completed", made.ask(ALICE, "GET", "runs/a/logs")
        yield made


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_shared_daemon_does_not_start_with_secrets() -> None:
    with tempfile.TemporaryDirectory(prefix="lr-") as home:
        Path(home).chmod(0o711)
        (Path(home) / "config.yaml").write_text("secrets: {MY_TOKEN: /root/token}\n")
        command = [*PASSABLE, sys.executable, "-m", "lorad.daemon", "--system"]
        env = os.environ | {"LORAD_HOME": home}
        done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode and "all users of a shared daemon would get them" in done.stderr
    assert "~/.config/lorad/secrets/MY_TOKEN" in done.stderr


def test_secrets_are_left_to_processes_of_their_user(box: Box) -> None:
    commands = [json.loads(path.read_text()) for path in box.home.glob("*/*/attempts/*/command.json")]
    roles = {command["role"] for command in commands if command["env"].get("LORAD_OWN_SECRETS") == "1"}
    assert roles == {"driver", "pool"} and not any(command.get("secret_files") for command in commands)


def test_figures_are_written_as_the_owner(box: Box, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    place = Path(tempfile.mkdtemp(prefix="lr-"))
    try:
        os.chown(place, ALICE, ALICE)
        box.run(ALICE, "logged", f"loggers=[{{tensorboard: {{dir: {place}}}}}]")
        box.over("logged")
        deadline = time.monotonic() + 60
        while not (files := list(place.glob("logged/*.lorad"))) or files[0].stat().st_size < 1000:
            assert time.monotonic() < deadline, box.ask(0, "GET", "status")
            time.sleep(0.1)
        assert {path.stat().st_uid for path in place.rglob("*")} == {ALICE}
        cursors = list((box.home / "runs" / "logged" / "loggers").glob("*.json"))
        assert [(path.stat().st_uid, path.stat().st_mode & 0o777) for path in cursors] == [(ALICE, 0o600)]
    finally:
        shutil.rmtree(place)


def test_notifications_run_as_the_owner(box: Box) -> None:
    place = Path(tempfile.mkdtemp(prefix="lr-"))
    try:
        os.chown(place, ALICE, ALICE)
        notify = f"notify=[{{command: [sh, -c, 'id -u >> {place}/got; cat >> {place}/got']}}]"
        box.run(ALICE, "noted", "trainer.steps=1", notify)
        box.over("noted")
        deadline = time.monotonic() + 60
        while not (place / "got").exists() or "completed" not in (place / "got").read_text():
            assert time.monotonic() < deadline, box.ask(0, "GET", "status")
            time.sleep(0.1)
        assert (place / "got").read_text().splitlines()[0] == str(ALICE)
        table = box.home / "notify" / "owners" / str(ALICE) / "table.json"
        assert (table.stat().st_uid, table.stat().st_mode & 0o777) == (ALICE, 0o400)
        assert (box.home / "notify" / "outbox.json").stat().st_mode & 0o777 == 0o600
    finally:
        shutil.rmtree(place)


PAIRS: list[dict[str, Any]] = [{"prompt": f"S:{n}=", "chosen": "12", "rejected": "21"} for n in range(10, 42)]
ROWS: list[dict[str, Any]] = [
    {"prompt": f"S:{n}=", "completion": "12", "answer": "12", "label": n % 2 == 0} for n in range(10, 42)
]
CODE = """
import asyncio
import json
from urllib.request import Request, urlopen
from lorad.envs.protocol import Observation


class Game:
    def reset(self, row, seed):
        return Observation(row["prompt"])

    def step(self, turn):
        return Observation(None, reward=1.0)

    def close(self):
        pass


async def program(base_url, task, sampling):
    asked = {"messages": [{"role": "user", "content": task["prompt"]}], **sampling}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    request = Request(f"{base_url}/chat/completions", json.dumps(asked).encode(), headers)
    with await asyncio.to_thread(urlopen, request) as answer:
        assert json.load(answer)["choices"]
    return 0.5


def reward(completion, answer):
    return float(answer in completion)
"""
KINDS = {
    "evaluated": ["eval.every=2", "eval.problems=8"],
    "sft": ["algorithm=sft", "data.train=rows.jsonl", "eval.every=2", "data.eval=rows.jsonl"],
    "dpo": ["algorithm=dpo", "data.train=pairs.jsonl"],
    "kto": ["algorithm={name: dpo, preference: {loss: kto}}", "data.train=rows.jsonl"],
    "ppo": ["algorithm={name: ppo, critic: {warmup_steps: 0}}"],
    "distill": ["algorithm={name: distill, kl: {reference: a@2}}"],
    "reward": ["data.train=rows.jsonl", "reward={name: code.py:reward, workers: 1}"],
    "environment": ["data.train=rows.jsonl", "env={name: code.py:Game, format: text, workers: 1}"],
    "program": [
        "data.train=rows.jsonl",
        "env={name: code.py:program, workers: 1}",
        "deterministic=false",
        "model.path=model",
    ],
}

# The others write what these do: data and evaluations of users, their code, a reference, a door.
IN_CI = ("dpo", "distill", "reward", "program")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in IN_CI else pytest.mark.long) for kind in KINDS]
)
def test_each_kind_of_run_completes_for_users(box: Box, kind: str) -> None:
    cwd = box.homes[BOB]
    files: dict[str, list[dict[str, Any]]] = {"rows.jsonl": ROWS, "pairs.jsonl": PAIRS}
    texts = {name: "".join(json.dumps(row) + "\n" for row in rows) for name, rows in files.items()}
    shutil.copytree(TINY, cwd / "model", dirs_exist_ok=True)
    for name, text in (texts | {"code.py": CODE, "model/chat_template.jinja": TEMPLATE}).items():
        (cwd / name).write_text(text)
        os.chown(cwd / name, BOB, BOB)
        (cwd / name).chmod(0o600)
    box.run(BOB, kind, *KINDS[kind], "trainer.steps=2", cwd=str(cwd))
    assert box.over(kind)["reason"] == "completed", box.ask(BOB, "GET", f"runs/{kind}/logs")
    own = [path for directory in RunDir(box.home / "runs" / kind).written for path in directory.rglob("*")]
    assert {path.stat().st_uid for path in own} == {BOB}


def test_run_processes_have_only_their_owners_rights() -> None:
    """Of programs that are executed: a fork has the environment of the warm process in /proc."""
    with boxed(COLD) as box:
        box.run(ALICE, "long", "trainer.steps=100000")
        while (
            len(shown := box.ask(ALICE, "GET", "runs/long")["processes"]) < 4
            or box.ask(ALICE, "GET", "runs/long")["step"] < 1
        ):
            time.sleep(0.05)
        pids = {process["role"]: process["pid"] for process in shown}
        for role in ("driver", "pool"):
            has_only_the_rights_of(ALICE, pids[role])
        assert status_of(pids["driver shim"])["Uid"].split() == ["0"] * 4
        box.ask(BOB, "POST", "runs/long/kill", {}, expect=403)
        box.ask(ALICE, "POST", "runs/long/kill", {})
        assert box.over("long")["reason"] == "killed"


def has_only_the_rights_of(uid: int, pid: int) -> None:
    status = status_of(pid)
    assert status["Uid"].split() == [str(uid)] * 4
    assert (status["NoNewPrivs"], int(status["CapEff"], 16), int(status["CapPrm"], 16)) == ("1", 0, 0)
    assert status["Groups"].split() == status["Gid"].split()[:1]
    environment = Path(f"/proc/{pid}/environ").read_text()
    assert "SECRET_OF_ROOT" not in environment
    assert f"USER={uid}" in environment
    files = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    assert not any("lorad.db" in file or "status.json" in file or "/dev/pts" in file for file in files)


def test_run_files_are_closed_to_other_users(box: Box) -> None:
    run = box.home / "runs" / "a"
    theirs = [
        run / "journal.jsonl",
        *(path for part in ("versions", "checkpoints", "samples") for path in (run / part).rglob("*")),
    ]
    assert len(theirs) > 20
    for path in (*theirs, run / "attempts" / "0001" / "work" / "params.json"):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777 in CLOSED) == (ALICE, True), path
    for path in (run / "attempts", run / "attempts/0001", box.home / "runs", box.home / "pools"):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o711), path
    for name in (
        "lorad.db",
        "journal.jsonl",
        "logs/daemon.log",
        "runs/a/spec.json",
        "runs/a/attempts/0001/command.json",
    ):
        assert (box.home / name).stat().st_mode & 0o077 == 0, name


def test_nobody_else_gets_into_a_users_directories(box: Box) -> None:
    try:
        os.setxattr(box.home.parent, "system.posix_acl_access", b"")  # none, where there can be one
    except OSError:
        pytest.skip("this file system has no access lists")
    for closed in (
        box.home / "runs" / "a",
        *(box.home / "pools").iterdir(),
        *(box.home / "gateway/owners").glob("*"),
    ):
        assert (closed.stat().st_uid, closed.stat().st_mode & 0o777) == (0, 0o710), closed
        inside = next(path for path in closed.iterdir() if path.stat().st_uid)
        for uid in (ALICE, BOB):
            is_denied = "denied" in as_user(uid, "stat", str(inside)).stderr
            assert is_denied is (uid != inside.stat().st_uid), inside


def as_user(uid: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PASSABLE, "setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *command],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )


def test_user_cannot_replace_what_the_daemon_reads(box: Box) -> None:
    run = box.home / "runs" / "a"
    for name in ("journal.jsonl", "versions", "samples", "attempts/0001/status.json"):
        done = as_user(ALICE, "mv", str(run / name), str(box.homes[ALICE]))
        assert "denied" in done.stderr
        assert "denied" in as_user(ALICE, "ln", "-s", "/etc/shadow", str(run / f"{name}.x")).stderr


def test_user_commands_work_but_start_no_daemon(box: Box) -> None:
    lorad = [sys.executable, "-m", "lorad"]
    home = f"LORAD_HOME={box.home}"
    listed = as_user(BOB, "env", home, f"HOME={box.homes[BOB]}", *lorad, "list", "--all", "--json")
    assert {run["name"] for run in json.loads(listed.stdout)} >= {"a"}
    told = as_user(BOB, "env", home, f"HOME={box.homes[BOB]}", *lorad, "doctor", "--json")
    assert all(check["ok"] for check in json.loads(told.stdout)), told.stdout
    silent = box.home.parent / "silent"
    silent.mkdir(mode=0o711)
    refused = as_user(BOB, "env", f"LORAD_HOME={silent}", *lorad, "daemon", "start")
    assert refused.returncode == 5
    assert "shared" in refused.stderr


def test_the_gateway_answers_whoever_may_see_a_version(box: Box) -> None:
    box.ask(ALICE, "POST", "aliases/bot", {"version": "a@2"})
    gateway = box.home / "gateway.sock"
    deadline = time.monotonic() + 60
    while not gateway.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    answer = as_user(BOB, sys.executable, "-c", ASK, str(gateway))
    assert "text_completion" in answer.stdout, answer.stderr


def test_version_is_exported_as_its_caller(box: Box) -> None:
    own, foreign = box.homes[BOB] / "adapter", box.homes[ALICE] / "adapter"
    box.ask(BOB, "POST", "versions/a@2/export", {"directory": str(own)})
    assert {path.stat().st_uid for path in (own, *own.iterdir())} == {BOB}
    box.ask(BOB, "POST", "versions/a@2/export", {"directory": str(foreign)}, expect=507)
    box.ask(BOB, "POST", "versions/a@2/export", {"directory": "/etc/lorad-export"}, expect=507)
    (box.homes[BOB] / "link").symlink_to("/etc/lorad-export")
    box.ask(BOB, "POST", "versions/a@2/export", {"directory": str(box.homes[BOB] / "link/x")}, expect=507)
    assert not foreign.exists() and not Path("/etc/lorad-export").exists()


def test_spec_paths_are_opened_as_caller(box: Box) -> None:
    secret = box.homes[ALICE] / "secret.jsonl"
    secret.write_text('{"prompt": "p", "answer": "hidden-words"}\n' * 8)
    os.chown(secret, ALICE, ALICE)
    secret.chmod(0o600)
    refused = box.run(BOB, "spy", f"data.train={secret}", "data.eval=null", expect=422)
    assert "hidden-words" not in str(refused)
    relative = box.run(BOB, "spy", "data.train=secret.jsonl", cwd=str(box.homes[ALICE]), expect=422)
    assert "hidden-words" not in str(relative)
    assert "absolute" in str(box.run(BOB, "spy", cwd="homes", expect=422))
    served = {
        "model": "builtin:tiny",
        "cwd": "/",
        "adapters": [{"name": "spy", "directory": str(box.homes[ALICE])}],
    }
    assert "Permission denied" in str(box.ask(BOB, "POST", "serve", served, expect=422))


def test_linked_samples_are_not_shown(box: Box) -> None:
    root_only = box.home.parent / "root-only"
    root_only.write_text("of root\n")
    root_only.chmod(0o600)
    samples = box.home / "runs/a/samples/000003-a1.jsonl"
    kept = samples.read_bytes()
    as_user(ALICE, "ln", "-sf", str(root_only), str(samples))
    answer = box.ask(ALICE, "GET", "runs/a/samples?step=3", expect=404)
    assert "of root" not in str(answer)
    checks = box.ask(ALICE, "POST", "runs/a/verify", {})["checks"]
    problems = {check["check"]: check["problems"] for check in checks}
    assert problems["samples"] == [f"{samples}: a link, not a file"] and not problems["versions"]
    # where the kernel lets users link what is not theirs
    as_user(ALICE, "ln", "-f", str(root_only), str(samples))
    if samples.stat().st_uid == 0:
        box.ask(ALICE, "GET", "runs/a/samples?step=3", expect=404)
    samples.unlink()
    samples.write_bytes(kept)
    os.chown(samples, ALICE, ALICE)


def test_version_linked_elsewhere_is_ignored(box: Box) -> None:
    version = box.home / "runs/a/versions/000001"
    version.rename(version.with_name("aside"))
    as_user(ALICE, "ln", "-s", "/root", str(version))
    try:
        shown = {row["version"]: row["path"] for row in box.ask(BOB, "GET", "versions?run=a")["items"]}
        assert shown[1] is None and shown[2] is not None
        box.ask(BOB, "POST", "versions/a@1/export", {"directory": str(box.homes[BOB] / "x")}, expect=404)
    finally:
        version.unlink()
        version.with_name("aside").rename(version)


def test_record_leading_outside_ends_only_its_run(box: Box) -> None:
    box.run(ALICE, "out", "trainer.steps=100000")
    while box.ask(ALICE, "GET", "runs/out")["step"] < 1:
        time.sleep(0.05)
    box.ask(ALICE, "POST", "runs/out/kill", {})
    box.over("out")
    journal = box.home / "runs/out/journal.jsonl"
    newest = [record for record, _ in read(journal)][-1]
    fact = VersionFact(newest.step + 1000, "0" * 64, None, "../a/versions/000001", 1, 1.0, 1, "passed", "")
    with JournalWriter(journal, "out", newest.attempt) as writer:
        writer.append("version", newest.step, fact)
    box.ask(ALICE, "POST", "runs/out/resume", {})
    shown = box.over("out")
    assert (shown["reason"], "is not in versions/" in shown["detail"]) == ("failed", True), shown
    assert box.ask(BOB, "GET", "status")["runs"]
