"""Another box: a home whose daemon is asked over ssh, by a fake one and by a real sshd where there is one."""

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lorad.box.paths import python_path
from lorad.client.boxes.hosts import HOST
from lorad.client.client import Client
from tests.hosts.sshd import real_sshd
from tests.kit.warm.client import PLACE
from tests.kit.warm.processes import CLIENT as WARM
from tests.kit.world import COLD, PATIENCE, REPOSITORY, World, world

FAKE_SSH = f"{sys.executable} -S {Path(__file__).with_name('fake_ssh.py')}"


class Box:
    """A far home, and the command here that is about it as `--host h2`.

    far: the world on the other side; its daemon runs as this user.
    is_real: whether an sshd serves it.
    python: how lorad is called over there.
    """

    def __init__(self, far: World, options: str, python: Sequence[str] = WARM) -> None:
        self.far = far
        self.is_real = options != FAKE_SSH
        self.here = far.root / "here"
        self.calls = far.root / "calls"
        self.calls.touch()
        self._options = options
        for part in ("bin", "config/lorad", "run", "work"):
            (self.here / part).mkdir(parents=True)
        self._script("ssh", f'echo "$@" >> {self.calls}\nexec {options} "$@"')
        self.command("lorad", REPOSITORY, python)
        self.add("h2", home=str(far.home.root))

    def command(self, name: str, tree: Path, python: Sequence[str] = COLD) -> str:
        """Write a command that is the lorad of a source tree, and return its path.

        A real sshd passes no variables on, so the one that names the warm process stands in the command.
        """
        warm = f"{PLACE}={os.environ.get(PLACE, '')}"
        return self._script(name, f'exec env PYTHONPATH={tree} {warm} {" ".join(python)} -m lorad "$@"')

    def _script(self, name: str, text: str) -> str:
        path = self.here / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def add(self, name: str, **entry: str) -> None:
        """Write a host into hosts.yaml."""
        path = self.here / "config/lorad/hosts.yaml"
        known = yaml.safe_load(path.read_text()) if path.exists() else {"hosts": {}}
        known["hosts"][name] = {"ssh": "box", "lorad": str(self.here / "bin/lorad"), **entry}
        path.write_text(json.dumps(known))

    @property
    def environment(self) -> dict[str, str]:
        """What a command here has: no LORAD_HOME, and an ssh of its own."""
        ours = {name: value for name, value in os.environ.items() if name not in ("LORAD_HOME", "LORAD_HOST")}
        return ours | {
            "PYTHONPATH": python_path(str(REPOSITORY), os.environ.get("PYTHONPATH")),
            "PATH": f"{self.here / 'bin'}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(self.here / "config"),
            "XDG_DATA_HOME": str(self.here / "data"),
            "XDG_RUNTIME_DIR": str(self.here / "run"),
            "FAKE_SSH_CALLS": os.devnull,
        }

    def lorad(self, *words: object, expect: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Return the finished command; its exit code must be `expect`."""
        done = subprocess.run(
            [*self.far.python, "-m", "lorad", *map(str, words)],
            env=self.environment | env,
            cwd=self.here / "work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == expect, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def there(self, *words: object, **more: Any) -> subprocess.CompletedProcess[str]:
        """Return a finished command about the box."""
        return self.lorad("--host", "h2", *words, **more)

    @property
    def ssh_calls(self) -> int:
        return len(self.calls.read_text().splitlines())

    def master(self) -> int:
        """Return the pid of the master that is up."""
        (control,) = (self.here / "run").rglob("*.ctl")
        done = subprocess.run(
            ["ssh", "-o", f"ControlPath={control}", "-O", "check", "--", "box"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found = re.search(r"pid=(\d+)", done.stderr)
        assert found is not None, done.stderr
        return int(found[1])

    def kill(self, what: str) -> None:
        """Kill the master, what sshd has started for it there, or the daemon; wait until it is gone.

        A process is a zombie before its last thread has closed its sockets.
        """
        master = psutil.Process(self.master())
        victim = {"master": lambda: master, "sshd's child": self._served, "daemon": self._daemon}[what]()
        victim.send_signal(signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            while victim.status() != psutil.STATUS_ZOMBIE or victim.num_threads() > 1:
                time.sleep(0.01)

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """Stop what sshd has started for the master: the line is there, and carries nothing."""
        served = self._served()
        served.suspend()
        try:
            yield
        finally:
            served.kill()

    def _served(self) -> psutil.Process:
        """Return the process of sshd at the other end of the master's connection."""
        (port,) = {
            connection.laddr.port
            for connection in psutil.Process(self.master()).net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED
        }
        for process in psutil.process_iter():
            if process.name().startswith("sshd"):
                ends = [connection.raddr[1:] for connection in process.net_connections("tcp")]
                if (port,) in ends:
                    return process
        raise AssertionError("no process of sshd is at the other end")

    def _daemon(self) -> psutil.Process:
        return psutil.Process(self.far.client.status().pid)

    def stopped_daemons(self) -> bool:
        """Return whether nothing was started in this user's own home here."""
        return not (self.here / "data").exists()

    def close(self) -> None:
        for control in (self.here / "run").rglob("*.ctl"):
            words = ["ssh", "-o", f"ControlPath={control}", "-O", "exit", "--", "box"]
            subprocess.run(words, env=self.environment, capture_output=True, check=False)


def asking(box: Box, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Make a client in this process that asks the box, whose daemon is started if need be."""
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LORAD_HOME", raising=False)
    monkeypatch.setenv(HOST, "h2")
    box.there("daemon", "start")
    return Client()


@contextlib.contextmanager
def sshd_on_loopback(user: str = "", **more: Any) -> Iterator[str]:
    """Give how ssh reaches a real sshd on loopback, as this user unless another is named."""
    if not Path("/usr/sbin/sshd").exists() or shutil.which("ssh") is None:
        pytest.skip("no sshd is installed (.ci/setup-browser installs Debian's)")
    with real_sshd(user or getpass.getuser(), **more) as options:
        yield options


@contextlib.contextmanager
def box_by(ssh: str, python: Sequence[str] = WARM) -> Iterator[Box]:
    """Give a box that these words reach."""
    with world() as far:
        made = Box(far, ssh, python)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="session")
def sshd_options() -> Iterator[str]:
    """How ssh reaches a real sshd on loopback."""
    with sshd_on_loopback() as options:
        yield options


# where the line is not what matters: what is asked and answered over it is the same by both
BY_FAKE = pytest.mark.parametrize(
    "box", ["fake", pytest.param("sshd", marks=pytest.mark.long)], indirect=True, scope="module"
)
# of what is of the second tier a fake ssh shows nothing that sshd does not
REAL = pytest.mark.parametrize(
    "box", [pytest.param("fake", marks=pytest.mark.long), "sshd"], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=["fake", pytest.param("sshd", marks=pytest.mark.system)])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A box whose daemon runs."""
    ssh = FAKE_SSH if request.param == "fake" else request.getfixturevalue("sshd_options")
    with box_by(ssh) as made:
        made.there("daemon", "start")
        yield made
