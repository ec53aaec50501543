"""A run over two nodes of this machine, started in a world, and what its pool was granted."""

import json
from typing import Any

import msgspec

from lorad.box.paths import AttemptDir
from lorad.daemon.process.processes import attempts_under
from lorad.protocol.journal import read
from lorad.protocol.nodes import GRANT, GrantStatus
from tests.kit.world import World

NAME = "spread"
_NODES = [{"host": f"h{number}", "address": f"127.0.0.{number}"} for number in (1, 2)]
SPEC = """
seed: 3
lora: {{rank: 4, alpha: 8, dropout: 0.1}}
algorithm: {{group_size: 4}}
data: {{train: sort, prompts_per_step: 4}}
trainer: {{backend: fsdp, dp: 2, lr: 2.0e-3, steps: {steps}, schedule: cosine}}
rollout: {{max_new_tokens: 8}}
eval: {{every: 0}}
checkpoint: {{every: 2}}
pool: {{threads: 2}}
resources: {{restart: on-failure}}
"""


def alone(made: World, steps: int) -> dict[str, Any]:
    """Make the run on this machine alone; returns its facts. The world has the nodes afterwards."""
    made.home.root.mkdir(mode=0o700)
    made.home.config.write_text(json.dumps({"cluster": {"kind": "static", "lease": 10, "nodes": _NODES}}))
    run = made.run("alone", text=SPEC.format(steps=steps))
    made.lorad("pools", "stop", run.pool)
    return made.facts("alone")


def start(made: World, steps: int) -> None:
    """Start the run over the nodes."""
    spec = SPEC.format(steps=steps)
    made.client.run(spec, source="a", cwd=str(made.root), overrides=["resources.nodes=2"], name=NAME)


def life(made: World) -> AttemptDir:
    """The newest life of the only pool on the cluster."""
    return max((one for pool in made.home.pools.iterdir() for one in attempts_under(pool)), key=_began)


def _began(one: AttemptDir) -> float:
    return one.command.stat().st_mtime


def granted(made: World) -> GrantStatus:
    return msgspec.json.decode((life(made).work / GRANT).read_bytes(), type=GrantStatus)


def steps_of(made: World, attempt: int) -> list[int]:
    """The steps that an attempt has made, as its journal has them."""
    journal = read(made.home.run(NAME).journal)
    return [record.step for record, _ in journal if record.attempt == attempt and record.kind == "step"]


def reached(made: World, attempt: int, step: int) -> None:
    what = f"attempt {attempt} at step {step}"
    made.until(lambda: max(steps_of(made, attempt), default=0) >= step, what)
