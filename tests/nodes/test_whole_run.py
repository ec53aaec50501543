"""A run over two nodes, both of them this machine: killed twice, it ends like one on a single machine."""

import contextlib
import json
import os
import signal
import sqlite3

import msgspec
import pytest

from lorad.box.paths import AttemptDir
from lorad.daemon.process.processes import attempts_under, read_status
from lorad.protocol.journal import read
from lorad.protocol.nodes import GRANT, GrantStatus
from tests.kit.world import World, world

NODES = [{"host": f"h{number}", "address": f"127.0.0.{number}"} for number in (1, 2)]
SPEC = """
seed: 3
lora: {rank: 4, alpha: 8, dropout: 0.1}
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 4}
trainer: {backend: fsdp, dp: 2, lr: 2.0e-3, steps: 9, schedule: cosine}
rollout: {max_new_tokens: 8}
eval: {every: 0}
checkpoint: {every: 2}
pool: {threads: 2}
resources: {restart: on-failure}
"""


def life(made: World) -> AttemptDir:
    """The newest life of the only pool on the cluster."""
    return max((one for pool in made.home.pools.iterdir() for one in attempts_under(pool)), key=life_time)


def life_time(one: AttemptDir) -> float:
    return one.command.stat().st_mtime


def granted(made: World) -> GrantStatus:
    return msgspec.json.decode((life(made).work / GRANT).read_bytes(), type=GrantStatus)


def reached(made: World, attempt: int, step: int) -> None:
    journal = made.home.run("spread").journal
    made.until(
        lambda: any(r.attempt == attempt and r.kind == "step" and r.step >= step for r, _ in read(journal)),
        f"attempt {attempt} at step {step}",
        seconds=180,
    )


@pytest.mark.long
def test_kills_of_a_spread_run_change_nothing() -> None:
    with world() as made:
        made.home.root.mkdir(mode=0o700)
        made.home.config.write_text(json.dumps({"cluster": {"kind": "static", "lease": 10, "nodes": NODES}}))
        alone = made.run("alone", text=SPEC)
        made.lorad("pools", "stop", alone.pool)
        made.client.run(SPEC, source="a", cwd=str(made.root), overrides=["resources.nodes=2"], name="spread")
        reached(made, 1, 3)
        os.kill((read_status(life(made)) or {})["pid"], signal.SIGKILL)
        reached(made, 2, 6)
        os.kill(granted(made).nodes[1].pid, signal.SIGKILL)
        over = made.completed("spread", seconds=240)
        assert over.attempt == 3
        assert made.facts("spread") == made.facts("alone")
        placed = [r.data for r, _ in read(made.home.run("spread").journal) if r.kind == "placed"]
        assert [[node["node"] for node in one["nodes"]] for one in placed] == [["h1", "h2"]] * 3
        assert {one["ranks"] for one in placed} == {2}
        (first, _) = made.client.nodes()
        assert (first.state, len(first.agents)) == ("granted", 1)
        with contextlib.closing(sqlite3.connect(f"file:{made.home.database}?mode=ro", uri=True)) as store:
            kinds = {kind for (kind,) in store.execute("SELECT kind FROM events WHERE run = 'spread'")}
        assert {"granted", "grant_lost", "node_lost"} <= kinds
