"""Where sshd forwards no sockets, or a key may do one thing, `lorad daemon dial` carries what is said."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lorad.box.paths import python_path
from lorad.errors import DaemonUnreachable
from tests.hosts.conftest import FAKE_SSH, Box, asking, box_by, sshd_on_loopback
from tests.kit.world import REPOSITORY, World

SPEC = """
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 2}
trainer: {steps: 2}
rollout: {max_new_tokens: 8}
eval: {every: 0}
"""

REAL = pytest.mark.parametrize(
    "closed", [pytest.param("fake", marks=pytest.mark.long), "sshd"], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=["fake", pytest.param("sshd", marks=pytest.mark.system)])
def closed(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A box whose daemon runs and whose sshd forwards no sockets."""
    if request.param == "fake":
        with pytest.MonkeyPatch.context() as patch, box_by(FAKE_SSH) as box:
            patch.setenv("FAKE_SSH_CLOSED", "1")
            box.there("daemon", "start")
            yield box
        return
    with sshd_on_loopback(forwards=False) as options, box_by(options) as box:
        box.there("daemon", "start")
        yield box


@pytest.mark.system
@REAL
def test_a_run_works_without_forwarding(closed: Box) -> None:
    (closed.here / "work/spec.yaml").write_text(SPEC)
    closed.there("run", "spec.yaml", "--name", "a", "--wait")
    assert [row["name"] for row in json.loads(closed.there("list", "--all", "--json").stdout)] == ["a"]
    closed.there("export", "a@1", "adapter", "--no-tokenizer")
    assert (closed.here / "work/adapter/adapter_model.safetensors").exists()
    assert closed.stopped_daemons()


def test_streams_are_dialled(closed: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    client = asking(closed, monkeypatch)
    events = client.events(-1)
    assert next(events).kind
    closed.kill("daemon")
    assert [event.kind for event in events if event.kind != "idle"] == []
    with pytest.raises(DaemonUnreachable, match="no daemon runs on h2"):
        client.status()
    closed.there("daemon", "start")
    assert client.status().home == str(closed.far.home.root)


def test_a_killed_master_is_replaced(closed: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    client = asking(closed, monkeypatch)
    client.status()
    before = closed.master()
    closed.kill("master")
    assert client.status().pid and closed.master() != before


@pytest.mark.system
def test_a_key_may_dial_alone() -> None:
    """`restrict` forbids terminals and forwarding; the command of the key is the only one that runs."""
    far = World()
    try:
        far.lorad("daemon", "start")
        settings = f"LORAD_HOME={far.home.root} PYTHONPATH={python_path(str(REPOSITORY))}"
        key = f'command="env {settings} {sys.executable} -m lorad daemon dial",restrict'
        with sshd_on_loopback(key=key) as options, box_by(options) as box:
            status = json.loads(box.there("top", "--json").stdout)
            assert status is not None
            assert json.loads(box.there("list", "--json").stdout) == []
            assert "calls nothing else" in box.there("doctor", expect=4).stderr
            assert "calls nothing else" in box.there("daemon", "stop", expect=4).stderr
            os.kill(far.client.status().pid, signal.SIGKILL)
            assert "no daemon runs on h2" in box.there("list", expect=5).stderr
    finally:
        far.close()


def test_dial_imports_little() -> None:
    program = "import sys; sys.argv[1:] = ['daemon', 'dial']; from lorad.__main__ import main; main(); "
    program += "sys.exit(bool({'typer', 'rich', 'msgspec', 'yaml'} & {*sys.modules}))"
    environment = os.environ | {"LORAD_HOME": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "no daemon answers on /nowhere/lorad.sock" in done.stderr
