"""Checks of `lorad doctor` on the cluster, and on Ray's; grants are known to a process of their own."""

import json
import os
from collections.abc import Iterator

import msgspec

from lorad.backends.spread import nodes_setup
from lorad.box.config import Config, load
from lorad.box.paths import Home
from lorad.children.interpreter import InterpreterFinding
from lorad.cli.doctor.engines import probed
from lorad.spec.model import convert
from lorad.text import counted

_BASES = 16
_MARKS = ("RAY_JOB_ID", "RAY_ADDRESS")


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
    yield InterpreterFinding("cluster", True, f"kind {cluster.kind}, {counted(count, 'node')} are asked for")
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
        "interpreters": {str(kind.python): name for name, kind in config.backends.items() if kind.python},
        "bases": [*bases][:_BASES],
    }
    yield from probed(home, ["lorad.grants.probe", msgspec.json.encode(asked).decode()])


def ray_job_check(settings: Config) -> Iterator[InterpreterFinding]:
    """Check that GPUs which Ray gave to others are not taken: lorad finds those of this machine by NVML."""
    variables = [name for name in _MARKS if os.environ.get(name)]
    if not variables:
        return
    is_ray = settings.cluster is not None and settings.cluster.kind == "ray"
    hint = (
        "Add `cluster: {kind: ray, python: PYTHON}` (that has Ray) to config.yaml (docs/cluster-recipes.md), "
        "or unset these variables where this machine's GPUs are yours alone."
    )
    names = "a Ray cluster" if is_ray else "no Ray cluster: runs would take GPUs that Ray gave to others"
    detail = f"{' and '.join(variables)} set, and config.yaml names {names}"
    yield InterpreterFinding("ray", is_ray, detail, hint)
