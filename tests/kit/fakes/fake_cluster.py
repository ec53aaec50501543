"""A cluster whose nodes are names in a file: pools take as many as they ask for, when so many are free."""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from lorad.box.cluster import Cluster, ClusterNode
from lorad.files import write_whole
from lorad.pool.config import log_directory
from lorad.protocol.nodes import GRANT, GrantedNode, GrantStatus

FILE = "cluster.json"


def cluster(home: Path, count: int, devices: int = 8, **settings: Any) -> Cluster:
    """Make a cluster of so many nodes, and its file."""
    names = [f"h{n}" for n in range(count)]
    write_cluster(home, dict.fromkeys(names))
    nodes = [ClusterNode(host=f"h{n}", address=f"10.0.0.{n}", devices=devices) for n in range(count)]
    return Cluster(kind="static", nodes=nodes, **settings)


def write_cluster(home: Path, holders: dict[str, int | None], uid: int | None = None) -> None:
    """holders: the pid that has each node; 1: somebody else. uid: whose the agents are."""
    said = json.dumps({"nodes": holders, "uid": os.getuid() if uid is None else uid})
    write_whole(home / FILE, said.encode())


def grant(pool_dir: Path, setup: dict[str, Any]) -> None:
    """Wait until this process has the nodes that its pool asks for."""
    wanted = setup["nodes"]["nodes"] + setup["nodes"]["rollout_nodes"]
    since = time.time()
    while (found := _take(wanted, [host["name"] for host in setup["nodes"]["hosts"]]))[0] is None:
        _say(pool_dir, GrantStatus(state="asked", words=f"{wanted} nodes: {found[1]} free", since=since))
        time.sleep(0.05)
    names, uid = found
    nodes = [_node(name, setup["nodes"]["devices"], uid) for name in sorted(names or ())]
    _say(pool_dir, GrantStatus(state="granted", since=time.time(), nodes=tuple(nodes)))


def _take(wanted: int, hosts: list[str]) -> tuple[list[str] | None, int]:
    """Take nodes: their names and whose the agents are; or None and how many are free."""
    with (Path(os.environ["LORAD_HOME"]) / FILE).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        there = json.loads(file.read())
        free = [name for name in hosts if not _lives(there["nodes"][name])]
        if len(free) < wanted:
            return None, len(free)
        there["nodes"] |= {name: os.getpid() for name in free[:wanted]}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(there))
        return free[:wanted], there["uid"]


def _lives(pid: int | None) -> bool:
    return pid is not None and psutil.pid_exists(pid)


def _node(name: str, devices: int, uid: int) -> GrantedNode:
    return GrantedNode(
        node=name,
        ip=f"10.0.0.{name[1:]}",
        port=1,
        certificate="",
        boot_id=f"boot of {name}",
        directory="/nowhere",
        devices=tuple(map(str, range(devices))),
        pid=1,
        lorad="0",
        uid=uid,
    )


def _say(pool_dir: Path, status: GrantStatus) -> None:
    path = log_directory(pool_dir) / GRANT
    whole = path.with_suffix(".new")
    whole.write_bytes(msgspec.json.encode(status))
    whole.rename(path)
