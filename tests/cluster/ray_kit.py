"""A Ray cluster over hosts of this machine, and grants that are asked of it."""

import contextlib
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host
from tests.kit.world import REPOSITORY

HERE = Path(__file__).parent
PYTHON = os.environ.get("LORAD_RAY_PYTHON", "")
_LORAD = Path(sys.executable)
_OF_STUBS = ("stub_agent", "stub-child", "ray::_Agent", "lorad.grants.ray")
_PORT, _STORE = 6379, 80_000_000  # bytes
_START_SECONDS, _TRIES = 180.0, 4
_LOOK_SECONDS = 0.05  # between two looks
PATIENCE = 300.0  # seconds for what comes in a few where the machine is quiet
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_open_telemetry": "0", "PYTHONPATH": str(REPOSITORY)}
_QUIET |= {
    "RAY_prestart_worker_first_driver": "0"
}  # each driver had four workers begun on each node, for nothing
Line = dict[str, Any]


class Cluster:
    """Ray over `hosts`: its head on the first, which has no device, two pretended GPUs on each other."""

    def __init__(
        self, hosts: Sequence[Host], work: Path, *, is_open: bool = False, port: int = _PORT
    ) -> None:
        self.home, self.nodes, self.work = hosts[0], list(hosts[1:]), work
        self.address, self._token = f"{self.home.ip}:{port}", secrets.token_hex(32)
        self.dashboard = f"http://{self.home.ip}:8265"
        self._has_dashboard = False
        self.token_file = self.written_token("token", self._token)
        self._env = _QUIET | (
            {"RAY_AUTH_MODE": "disabled"}
            if is_open
            else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}
        )

    def written_token(self, name: str, token: str, mode: int = 0o600) -> Path:
        path = self.work / name
        path.write_text(token)
        path.chmod(mode)
        return path

    def start(self) -> None:
        self.start_head("--num-cpus=0")
        self.join(self.nodes)

    def start_head(self, *more: str) -> None:
        port = self.address.rpartition(":")[2]
        where = f"--node-ip-address={self.home.ip}"
        dashboard = [f"--include-dashboard={str(self._has_dashboard).lower()}", "--dashboard-host=0.0.0.0"]
        head = ["--head", "--no-monitor", f"--port={port}", where, "--num-gpus=0"]
        self._start({self.home: [*head, *dashboard, *more]})

    def join(self, nodes: Sequence[Host], *more: str) -> None:
        """Start Ray on these nodes, side by side."""
        own = [f"--address={self.address}", "--num-cpus=4", "--num-gpus=2", *more]
        self._start(
            {node: [*own, f"--node-ip-address={node.ip}", f"--labels=host={node.name}"] for node in nodes}
        )

    def stop(self, node: Host, *, force: bool = False) -> None:
        node.run(_ray(), "stop", *(["--force"] if force else ["--grace-period=10"]), env=self._env)

    def end(self) -> None:
        for host in (self.home, *self.nodes):
            self.stop(host, force=True)

    @contextlib.contextmanager
    def anew(self, *, dashboard: bool = False, **env: str) -> Iterator[None]:
        """Have the cluster started anew with these variables, and again without them at the end."""
        before = self._env
        self.end()
        try:
            self._env, self._has_dashboard = self._env | env, dashboard
            self.start()
            yield
        finally:
            self.end()
            self._env, self._has_dashboard = before, False
            self.start()

    def ray(self, *arguments: str) -> tuple[int, str]:
        """Run a command of Ray on the head, to its end; returns its exit code and output."""
        env, out = {**os.environ, **self._env}, subprocess.PIPE
        with self.home.start(_ray(), *arguments, env=env, stdout=out, stderr=subprocess.STDOUT) as process:
            said, _ = process.communicate(timeout=1800)
        return process.returncode, said

    def asked_of_ray(self, code: str) -> Any:
        """Run `code`, which sets `said`, in a driver of its own on the head; returns that."""
        connect = f"ray.init(address={self.address!r}, log_to_driver=False, logging_level='ERROR')"
        script = f"import json, ray\n{connect}\n{code}\nprint('\\n' + json.dumps(said))"
        return json.loads(self.home.run(PYTHON, "-c", script, env=self._env).strip().splitlines()[-1])

    def _start(self, starts: Mapping[Host, Sequence[str]]) -> None:
        """Start Ray on these hosts; again where its own limits, of half a minute each, were too short."""
        left = dict(starts)
        for _ in range(_TRIES):
            begun = {host: self._starting(host, *arguments) for host, arguments in left.items()}
            failed = [host for host, process in begun.items() if process.wait(_START_SECONDS)]
            for host in failed:
                self.stop(host, force=True)
            if not (left := {host: starts[host] for host in failed}):
                return
        raise AssertionError((self.work / f"ray-{failed[0].name}.log").read_text()[-4000:])

    def _starting(self, host: Host, *arguments: str) -> subprocess.Popen[str]:
        common = [f"--object-store-memory={_STORE}", "--disable-usage-stats"]
        common += ["--include-log-monitor=false"]  # nobody reads what it passes on
        env = {**os.environ, **self._env}
        with (self.work / f"ray-{host.name}.log").open("a") as log:
            return host.start(_ray(), "start", *arguments, *common, env=env, stdout=log, stderr=log)


class Grant:
    """A grant process on the home host, and this process as the pool that asked for it."""

    def __init__(
        self,
        cluster: Cluster,
        life: str,
        *,
        env: Mapping[str, str] = {},
        argv: Sequence[str] = (),
        wrap: Sequence[str] = (),
        **setup: Any,
    ) -> None:
        self.life, self._directory = life, cluster.work / life.replace("/", "-")
        self._directory.mkdir()
        path = self._directory / "grant.sock"
        own = {
            "kind": "ray",
            "nodes": 2,
            "devices": 2,
            "lease": 5.0,
            "address": cluster.address,
        }
        own |= {"python": str(_LORAD), "token_file": str(cluster.token_file)}
        request = {
            "setup": {**own, **setup},
            "life": life,
            "socket": str(path),
            "certificate": "PEM of the pool",
            "agent": ["-P", str(HERE / "stub_agent.py"), *argv],
        }
        (self._directory / "grant.json").write_text(json.dumps(request))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        command = [*wrap, PYTHON, "-P", "-m", "lorad.grants.ray", str(self._directory / "grant.json")]
        self.log = self._directory / "grant.log"
        with self.log.open("w") as log:
            self.process = cluster.home.start(
                *command, env={**os.environ, **_QUIET, **env}, stdout=log, stderr=log
            )
        listener.settimeout(PATIENCE)
        self._connection, _ = listener.accept()
        listener.close()
        self._lines = self._connection.makefile()

    def line(self, seconds: float = PATIENCE) -> Line:
        """Return the next line; {} at the end of the connection."""
        self._connection.settimeout(seconds)
        text = self._lines.readline()
        return json.loads(text) if text else {}

    def until(self, kind: str, seconds: float = PATIENCE) -> Line:
        """Return the next line of a kind."""
        end = time.monotonic() + seconds
        while True:
            said = self.line(end - time.monotonic())
            assert said, f"the grant ended before it said {kind}: {self.log.read_text()[-2000:]}"
            if said["kind"] == kind:
                return said

    def close(self) -> int:
        """Close the connection, as the end of the pool does; returns the exit code of the grant."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()
        return self.process.wait(PATIENCE)


class Head:
    """A pool on the home host over two nodes, in a life of its own. script: what it does, and says."""

    _lives = itertools.count(1)

    def __init__(self, cluster: Cluster, script: str = "pool_head.py", **more: Any) -> None:
        self._home, self._script = cluster.home, script
        self.directory = directory = cluster.work / f"pool{next(self._lives)}"
        directory.mkdir()
        setup = {"kind": "ray", "nodes": 2, "lease": 5.0, "address": cluster.address} | more
        setup |= {"python": str(_LORAD), "cluster_python": PYTHON, "token_file": str(cluster.token_file)}
        self.log = directory / "head.log"
        with self.log.open("w") as log:
            self._process = cluster.home.start(
                *(str(_LORAD), str(HERE / script), json.dumps(setup), str(directory)),
                env={**os.environ, **_QUIET, "TMPDIR": str(directory)},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._lines: queue.SimpleQueue[tuple[float, Line]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def line(self, seconds: float = PATIENCE) -> Line:
        """Return the next line; {} at the end."""
        return self._lines.get(timeout=seconds)[1]

    def until(self, kind: str, seconds: float = PATIENCE, **fields: object) -> Line:
        """Return the next line of a kind that has these values."""
        end = time.monotonic() + seconds
        while True:
            said = self.line(max(0.1, end - time.monotonic()))
            assert said, f"the pool ended before it said {kind} {fields}: {self.log.read_text()[-2000:]}"
            if said["kind"] == kind and fields.items() <= said.items():
                return said

    def ended_after(self, began: float) -> Callable[[], tuple[float, str] | None]:
        """Return a function that says how long after `began` the pool knew, and why; None: it never did."""

        def seconds() -> tuple[float, str] | None:
            self._process.send_signal(signal.SIGCONT)  # nsenter stops where its child does
            at, said = self._lines.get(timeout=PATIENCE)
            return (at - began, said["why"]) if said else None

        return seconds

    def end(self) -> None:
        for pid, line in self._home.processes().items():
            if self._script in line and str(self.directory) in line:  # nsenter passes no signal on
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout
        for text in self._process.stdout:
            self._lines.put((time.monotonic(), json.loads(text)))
        self._lines.put((time.monotonic(), {}))


def left_on(hosts: Sequence[Host], marks: Sequence[str] = _OF_STUBS) -> list[str]:
    """List what is left of grants on these hosts."""
    return [
        f"{host.name} {line}"
        for host in hosts
        for line in host.processes().values()
        if any(mark in line for mark in marks)
    ]


def nothing_left_on(hosts: Sequence[Host], marks: Sequence[str] = _OF_STUBS, seconds: float = 15.0) -> float:
    """Wait until nothing is left; returns how long that took.

    seconds: how long this may sleep meanwhile. Looking takes time of its own on a busy machine, where all
    that is waited for is slower, too.
    """
    began = time.monotonic()
    slept = 0.0
    while left := left_on(hosts, marks):
        assert slept < seconds, f"left after {seconds:.0f} s: {left}"
        time.sleep(_LOOK_SECONDS)
        slept += _LOOK_SECONDS
    return time.monotonic() - began


def _ray() -> str:
    return str(Path(PYTHON).parent / "ray")


@contextlib.contextmanager
def asked(cluster: Cluster, life: str, **more: Any) -> Iterator[Grant]:
    """Ask for a grant; it is given back at the end."""
    grant = Grant(cluster, life, **more)
    try:
        yield grant
    finally:
        grant.close()


@contextlib.contextmanager
def granted(cluster: Cluster, life: str, **setup: Any) -> Iterator[tuple[Grant, list[Line]]]:
    """Ask for a grant and wait for it; it is given back, and nothing is left of it, at the end."""
    with asked(cluster, life, **setup) as grant:
        yield grant, grant.until("Granted")["nodes"]
    nothing_left_on([cluster.home, *cluster.nodes])
