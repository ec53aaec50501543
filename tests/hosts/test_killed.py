"""kill -9 of the master, of sshd's child and of the daemon, amid a stream and amid a POST."""

import subprocess
from pathlib import Path

import pytest

from lorad.errors import DaemonUnreachable
from tests.hosts.conftest import REAL, Box, asking
from tests.kit.world import PATIENCE

SLOW = """
import pathlib, time
place = pathlib.Path(__file__).parent
(place / "begun").touch()
while not (place / "go").exists():
    time.sleep(0.02)
def score(completion):
    return 0.0
"""
SPEC = "data: {train: sort, prompts_per_step: 2}\nreward: slow.py:score\nresources: {group: held}\n"
pytestmark = [pytest.mark.system, REAL]
VICTIMS = ("master", "sshd's child", "daemon")


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.long if name == "sshd's child" else ()) for name in VICTIMS]
)
def victim(request: pytest.FixtureRequest, box: Box) -> str:
    """What is killed. The box's daemon runs, and the line is open."""
    if request.param == "sshd's child" and not box.is_real:
        pytest.skip("a fake ssh has no process there")
    box.there("daemon", "start")
    box.there("list")
    return str(request.param)


def test_a_broken_stream_can_be_read_again(box: Box, victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = asking(box, monkeypatch)
    events = client.events(-1)
    first = next(events)
    box.kill(victim)
    assert [event.kind for event in events if event.kind != "idle"] == []
    if victim == "daemon":
        with pytest.raises(DaemonUnreachable, match="no daemon runs on h2") as refused:
            next(client.events(-1))
        assert "`lorad --host h2 daemon start`" in refused.value.hint
        box.there("daemon", "start")
    assert next(client.events(-1)).id >= first.id
    assert box.stopped_daemons()


def test_a_broken_verb_says_it_may_be_done(box: Box, victim: str, tmp_path: Path) -> None:
    """The daemon is importing a file of the user's when what is between breaks; and goes on with it."""
    (tmp_path / "slow.py").write_text(SLOW)
    (box.here / "work/slow.yaml").write_text(SPEC)
    box.far.client.limit_group("held", 0)  # the run need not work
    name = f"slow-{VICTIMS.index(victim)}"
    command = ["--host", "h2", "--cwd", str(tmp_path), "run", "slow.yaml", "--name", name, "--detach"]
    with subprocess.Popen(
        [*box.far.python, "-m", "lorad", *command],
        env=box.environment,
        cwd=box.here / "work",
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        box.far.until((tmp_path / "begun").exists, "the file is imported")
        box.kill(victim)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 5 and "may have been carried out" in said, said
    assert "`lorad --host h2 list`" in said and "before you repeat it" in said
    assert ("`lorad --host h2 daemon start`" in said) == (victim == "daemon"), said
    (tmp_path / "go").touch()
    if victim == "daemon":
        box.there("daemon", "start")
        assert name not in box.there("list", "--all").stdout
        box.lorad(*command)
    box.far.until(lambda: name in [run.name for run in box.far.client.list()], "the run is there")
    assert f"there is a run named {name}" in box.lorad(*command, expect=1).stderr
    box.there("kill", name)
    assert box.stopped_daemons()
