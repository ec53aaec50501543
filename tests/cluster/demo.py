"""`make cluster-demo`: a Ray cluster on this machine, and a run over two of its nodes that is killed there.

Ray's head and two nodes are processes of this machine, without root. The run is made twice with the same
seed: once left alone, once with kill -9 of everything that the pool has on one node, and then resumed. Both
end with the same adapter, bit for bit.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.kit.leftovers import kill_leftovers
from tests.kit.world import REPOSITORY

_SPEC = REPOSITORY / "examples" / "cluster" / "demo.yaml"
_RAY = Path(os.environ.get("LORAD_RAY_PYTHON", "")).parent / "ray"
_STORE = 80_000_000  # bytes
_LORAD = [sys.executable, "-m", "lorad"]


def _say(text: str) -> None:
    print(f"==> {text}", flush=True)


@contextlib.contextmanager
def _cluster(work: Path) -> Iterator[str]:
    """Start Ray: a head without devices, and the nodes n1 and n2; returns its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    token = work / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    os.environ.update(
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_TMPDIR=str(work), RAY_ADDRESS=address
    )
    common = ["--num-gpus=0", f"--object-store-memory={_STORE}", "--disable-usage-stats"]
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false", "--num-cpus=0"]
    before = set(psutil.pids())
    try:
        _ray(work, "start", *head, f"--temp-dir={work / 'ray'}", "--node-ip-address=127.0.0.1", *common)
        for node in ("n1", "n2"):
            _ray(work, "start", f"--address={address}", f"--node-name={node}", "--num-cpus=1", *common)
        yield address
    finally:
        for process in _processes(str(work / "ray"), before):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _ray(work: Path, *arguments: str) -> None:
    with (work / "ray.log").open("a") as log:
        subprocess.run([str(_RAY), *arguments], check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _processes(mark: str, before: set[int]) -> list[psutil.Process]:
    """List processes that began after `before` was taken, with `mark` in their command lines."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in before and mark in " ".join(process.cmdline()):
                found.append(process)
    return found


def _lorad(*arguments: str) -> Any:
    done = subprocess.run([*_LORAD, *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _run(name: str) -> str:
    """Make a run from start to end in view; returns the sha256 of its last version."""
    subprocess.run([*_LORAD, "run", str(_SPEC), "--name", name, "--wait"], check=True)
    return _digest(name)


def _digest(name: str) -> str:
    return str(max(_lorad("adapters", name), key=lambda version: version["step"])["sha256"])


def _run_and_kill(name: str, step: int) -> str:
    """Make a run, kill all that it has on node n2 at a step, and resume it."""
    subprocess.run([*_LORAD, "run", str(_SPEC), "--name", name, "--detach"], check=True)
    while (run := _lorad("show", name))["step"] < step:
        if run["state"] in ("ended", "paused"):
            raise SystemExit(f"{name} is {run['state']} at step {run['step']}: {run['why']}")
        time.sleep(0.1)
    agents = [process for process in _processes("lorad.nodes.agent", set()) if _is_of(process, "n2")]
    if not agents:
        raise SystemExit("node n2 has no agent")
    victims = [victim for agent in agents for victim in [agent, *agent.children(recursive=True)]]
    _say(f"step {run['step']}: kill -9 of the {len(victims)} processes on node n2")
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
    subprocess.run([*_LORAD, "attach", name], check=False)
    _say(f"lorad resume {name}: a new life of the pool, on both nodes")
    subprocess.run([*_LORAD, "resume", name, "--wait"], check=True)
    return _digest(name)


def _is_of(process: psutil.Process, node: str) -> bool:
    line = process.cmdline()
    return "--name" in line and line[line.index("--name") + 1] == node


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=5, help="at which the node is killed")
    step = parser.parse_args().step
    work = Path(tempfile.mkdtemp(prefix="lr-demo-", dir="/tmp"))  # a short path, for sockets
    home = work / "home"
    home.mkdir(mode=0o700)
    os.environ["LORAD_HOME"] = str(home)
    began = time.monotonic()
    try:
        _say("a Ray cluster: its head, and the nodes n1 and n2")
        with _cluster(work) as address:
            python, token = os.environ["LORAD_RAY_PYTHON"], work / "token"
            (home / "config.yaml").write_text(
                f"cluster: {{kind: ray, address: '{address}', python: {python}, token_file: {token}, "
                "device: cpu, lease: 10}\n"
            )
            _say(f"a run over both nodes (up after {time.monotonic() - began:.0f} s)")
            alone = _run("alone")
            subprocess.run([*_LORAD, "nodes"], check=True)
            _say("the same run, with a node that dies")
            killed = _run_and_kill("killed", step)
            subprocess.run([*_LORAD, "daemon", "stop", "--pools", "--gateway"], check=True)
    finally:
        kill_leftovers(home)
        shutil.rmtree(work, ignore_errors=True)
    same = alone == killed
    _say(
        f"alone {alone[:16]}, killed and resumed {killed[:16]}: {'the same bits' if same else 'NOT the same'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
