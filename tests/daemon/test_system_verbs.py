"""What a user does with runs and versions on a daemon that several users share works, as that user."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from aiohttp.test_utils import unused_port

from lorad.box.paths import RunDir
from tests.daemon.test_system_mode import BOB, Box, as_user
from tests.kit.passable import why_not
from tests.kit.pool_kit import TINY
from tests.kit.world import SMALL

pytestmark = pytest.mark.system

TOKEN = "the-token-of-bob-has-no-end"
ALWAYS = "S:21="  # what the judge's model is asked, whatever was said; it answers in digits
LOGGERS = "loggers=[{{tensorboard: {{dir: {0}/tb}}}}, {{wandb: {{mode: offline, dir: {0}/wb}}}}]"
MLFLOW = "loggers=[{{mlflow: {{uri: 'sqlite:///{0}/ml.db'}}}}]"  # which takes seconds to import
JUDGE = (
    "reward={{name: judge, url: 'http://127.0.0.1:{}/v1', model: bot, key_file: key, cache: cache, "
    "prompt: '{{completion}}', pattern: '([0-9]+)', max_tokens: 2, range: [0, 99], timeout: 60}}"
)


@pytest.fixture(scope="module", autouse=True)
def users() -> None:
    if reason := why_not():
        pytest.skip(reason)


class Busy(Box):
    """A run of Bob's, `a`, with evaluations and loggers."""

    def __init__(self, root: Path) -> None:
        self.port = unused_port()
        tokens = root / "tokens.yaml"
        tokens.write_text(f"'{BOB}': {TOKEN}\n")
        tokens.chmod(0o600)
        (root / "lorad").mkdir()
        (root / "lorad" / "config.yaml").write_text(f"gateway: {{port: {self.port}, tokens: {tokens}}}\n")
        super().__init__(root)
        self.cwd = self.homes[BOB]
        shutil.copytree(TINY, self.cwd / "model")
        (self.cwd / "model" / "chat_template.jinja").write_text(ALWAYS)
        (self.cwd / "key").write_text(TOKEN)
        (self.cwd / "spec.yaml").write_text(f"model: {{path: model}}\n{SMALL}")
        for path in self.cwd.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
            os.chown(path, BOB, BOB)

    def begin(self, name: str, *overrides: str) -> None:
        self.run(BOB, name, "model.path=model", *overrides, cwd=str(self.cwd))

    def does(self, path: str, **body: Any) -> Any:
        return self.ask(BOB, "POST", path, body)

    def shows(self, path: str) -> Any:
        return self.ask(BOB, "GET", path)

    def completes(self, name: str) -> None:
        assert self.over(name)["reason"] == "completed", self.shows(f"runs/{name}/logs")

    def lorad(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = "-C", str(self.cwd), f"LORAD_HOME={self.home}", f"HOME={self.cwd}"
        return as_user(BOB, "env", *environment, sys.executable, "-m", "lorad", *arguments)


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def box() -> Iterator[Busy]:
    root = Path(tempfile.mkdtemp(prefix="lr-"))
    root.chmod(0o711)
    made = Busy(root)
    try:
        made.begin("a", "trainer.steps=2", "eval.every=2", "eval.problems=4", LOGGERS.format(made.cwd))
        made.completes("a")
        made.does("aliases/bot", version="a@2")
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)


def test_each_logger_writes_files_as_the_owner(box: Busy) -> None:
    are_written_as_the_owner(box, "a", "tb/a/*.lorad", "wb/**/*.wandb")


@pytest.mark.long
def test_mlflow_writes_files_as_the_owner(box: Busy) -> None:
    box.begin("tracked", "trainer.steps=1", MLFLOW.format(box.cwd))
    box.completes("tracked")
    are_written_as_the_owner(box, "tracked", "ml.db")


def are_written_as_the_owner(box: Busy, run: str, *patterns: str) -> None:
    """Wait until each logger of a run has written all; then look at whose files of these patterns are."""

    def are_done() -> bool:
        cursors = [*RunDir(box.home / "runs" / run).loggers.glob("*.json")]
        return len(cursors) == len(patterns) and all(json.loads(path.read_text())["done"] for path in cursors)

    until(are_done)
    for pattern in patterns:
        files = [path for path in box.cwd.glob(pattern) if path.stat().st_size]
        assert files and {path.stat().st_uid for path in files} == {BOB}, pattern


def test_paused_run_goes_on_when_resumed(box: Busy) -> None:
    box.begin("held", "trainer.steps=100000", "checkpoint.every=1")
    until(lambda: box.shows("runs/held")["step"] >= 1)
    box.does("runs/held/pause")
    paused = box.over("held")
    assert paused["state"] == "paused"
    box.does("runs/held/resume", steps=paused["step"] + 1)
    box.completes("held")


def test_run_of_a_killed_driver_is_resumed(box: Busy) -> None:
    box.begin("hurt", "trainer.steps=100000", "checkpoint.every=1")
    until(lambda: box.shows("runs/hurt/checkpoints")["items"])
    [driver] = [one["pid"] for one in box.shows("runs/hurt")["processes"] if one["role"] == "driver"]
    os.kill(driver, 9)
    lost = box.over("hurt")
    assert lost["reason"] == "lost"
    box.does("runs/hurt/resume", steps=lost["step"] + 1)
    box.completes("hurt")


def test_forks_and_points_of_a_sweep_complete(box: Busy) -> None:
    box.does("versions/a@2/fork", name="fork", steps=1)
    box.does("versions/a@2/fork", name="fresh", fresh=True, steps=1)
    spec = {"spec": SMALL, "source": "a.yaml", "cwd": str(box.cwd), "name": "grid"}
    box.does("sweeps", **spec, overrides=["model.path=model", "trainer.steps=1", "seed=1,2"])
    for name in ("fork", "fresh", "grid-1", "grid-2"):
        box.completes(name)


def test_alias_is_swapped_rolled_back_and_answers(box: Busy) -> None:
    box.does("aliases/other", version="a@1")
    box.does("aliases/other", version="a@2")
    assert box.does("aliases/other", rollback=True)["version"] == 1
    box.does("versions/a@1/pin")
    assert box.does("generate", version="other", prompt="S:21=")["completions"]
    box.does("serve", model=str(box.cwd / "model"), cwd="/")
    asked = {"model": "other", "prompt": "S:21=", "max_tokens": 4}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx2.post(
        f"http://127.0.0.1:{box.port}/v1/completions", json=asked, headers=headers, timeout=60
    )
    assert answer.status_code == 200, answer.text


def test_served_version_judges_another_run(box: Busy) -> None:
    box.begin("judged", "trainer.steps=1", JUDGE.format(box.port))
    box.completes("judged")
    kept = [path for path in (box.cwd / "cache").rglob("*") if path.is_file()]
    assert kept and {path.stat().st_uid for path in kept} == {BOB}


def test_checkpoints_evaluations_and_exports_are_there(box: Busy) -> None:
    [checkpoint] = box.shows("runs/a/checkpoints")["items"]
    assert Path(checkpoint["path"]).stat().st_uid == BOB
    assert len(box.shows("runs/a/samples?step=2&eval=main")["items"]) == 4
    box.does("versions/a@2/export", directory=str(box.cwd / "adapter"))
    assert {path.stat().st_uid for path in (box.cwd / "adapter").iterdir()} == {BOB}
    assert box.does("runs/a/verify")["problems"] == 0


@pytest.mark.parametrize("verb", ["check", "try"])
def test_spec_is_checked_and_tried_by_command(box: Busy, verb: str) -> None:
    done = box.lorad(verb, "spec.yaml")
    assert done.returncode == 0, done.stderr


def test_nothing_was_denied_and_nothing_is_misplaced(box: Busy) -> None:
    box.begin("after", "trainer.steps=1")
    box.completes("after")
    logs = [path for pattern in ("log", "*.log") for path in box.home.rglob(pattern) if path.is_file()]
    denied = [path for path in logs if "Permission denied" in path.read_text(errors="replace")]
    assert len(logs) > 4 and not denied
    for run in (RunDir(path) for path in (box.home / "runs").iterdir()):
        own = {*run.written, run.journal, run.origin}
        assert {path for path in run.root.iterdir() if path.stat().st_uid == BOB} <= own
        files = [path for directory in own if directory.exists() for path in directory.rglob("*")]
        assert {path.stat().st_uid for path in files} == {BOB}
