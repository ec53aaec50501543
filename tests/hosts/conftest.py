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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lorad.box.paths import python_path
from tests.hosts.sshd import real_sshd
from tests.kit.world import PATIENCE, REPOSITORY, World, world

FAKE = Path(__file__).with_name("fake_ssh.py")


class Box:
    """A far home, and the command here that is about it as `--host h2`.

    far: the world on the other side; its daemon runs as this user.
    """

    def __init__(self, far: World, options: str) -> None:
        self.far = far
        self.here = far.root / "here"
        self.calls = far.root / "calls"
        self.calls.touch()
        self._options = options
        for part in ("bin", "config/lorad", "run", "work"):
            (self.here / part).mkdir(parents=True)
        self._script("ssh", f'echo "$@" >> {self.calls}\nexec {options} "$@"')
        environment = f"PYTHONPATH={python_path(str(REPOSITORY))}"
        self._script("lorad", f'exec env {environment} {sys.executable} -m lorad "$@"')
        self.add("h2", home=str(far.home.root))

    def _script(self, name: str, text: str) -> None:
        path = self.here / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

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

    def kill_master(self) -> None:
        """Kill the master, and wait until it is gone."""
        process = psutil.Process(self.master())
        process.send_signal(signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                process.wait(10)

    def stopped_daemons(self) -> bool:
        """Return whether nothing was started in this user's own home here."""
        return not (self.here / "data").exists()

    def close(self) -> None:
        for control in (self.here / "run").rglob("*.ctl"):
            words = ["ssh", "-o", f"ControlPath={control}", "-O", "exit", "--", "box"]
            subprocess.run(words, env=self.environment, capture_output=True, check=False)


@pytest.fixture(scope="session")
def sshd_options() -> Iterator[str]:
    """How ssh reaches a real sshd on loopback."""
    if not Path("/usr/sbin/sshd").exists() or shutil.which("ssh") is None:
        pytest.skip("no sshd is installed (.ci/setup-browser installs Debian's)")
    with real_sshd(getpass.getuser()) as options:
        yield options


@pytest.fixture(scope="module", params=["fake", pytest.param("sshd", marks=pytest.mark.system)])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A box whose daemon runs."""
    ssh = f"{sys.executable} -S {FAKE}"
    if request.param == "sshd":
        ssh = request.getfixturevalue("sshd_options")
    with world() as far:
        made = Box(far, ssh)
        try:
            made.there("daemon", "start")
            yield made
        finally:
            made.close()
