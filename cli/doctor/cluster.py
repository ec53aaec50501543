"""Checks of `lorad doctor --cluster`: in a process of its own, as commands know nothing of grants."""

import json
from collections.abc import Iterator

import msgspec

from lorad.backends.spread import nodes_setup
from lorad.box.config import load
from lorad.box.paths import Home
from lorad.children.interpreter import InterpreterFinding
from lorad.cli.doctor.engines import probed
from lorad.spec.model import convert

_BASES = 16


def cluster_checks(home: Home, nodes: int | None) -> Iterator[InterpreterFinding]:
    """Ask for processors of nodes, all of kind static or one of a Ray cluster, and look around there."""
    config = load(home.config)
    cluster = config.cluster
    if cluster is None:
        hint = "Write `cluster:` into it, see docs/cluster.md."
        yield InterpreterFinding("cluster", False, f"{home.config} has none", hint)
        return
    count = nodes or len(cluster.nodes) or 1
    spec = convert({"trainer": {"backend": "fsdp", "dp": count}, "resources": {"nodes": count}})
    setup = msgspec.structs.replace(nodes_setup(spec, cluster), devices=0)
    yield InterpreterFinding(
        "cluster", True, f"kind {cluster.kind}, {count} node{'' if count == 1 else 's'} are asked for"
    )
    bases: dict[str, None] = {}  # of pools of this home that have been on the cluster
    for path in sorted(home.pools.glob("*/pool.json")):
        try:
            pool = json.loads(path.read_bytes())
            bases |= {str(pool["model_path"]): None} if pool.get("nodes") else {}
        except (OSError, ValueError, KeyError, AttributeError):
            continue
    asked = {
        "setup": setup,
        "devices": {node.host: node.devices for node in cluster.nodes},
        "interpreters": {str(one.python): name for name, one in config.backends.items() if one.python},
        "bases": [*bases][:_BASES],
    }
    yield from probed(home, ["lorad.grants.probe", msgspec.json.encode(asked).decode()])
