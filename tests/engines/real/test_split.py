"""A pool whose real servers have nodes, or devices, of their own beside those that train."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from benchmarks.training.split import timeline
from lorad.protocol.journal import read
from lorad.protocol.nodes import GRANT, GrantStatus, NodesSetup, StaticNode
from lorad.protocol.pool_setup import RanksSetup
from tests.engines.real.places import setup_of
from tests.kit import pool_kit
from tests.kit.pool_kit import OPEN, generate, learn, publish, running_pool, until
from tests.kit.world import World, world
from tests.trainers.real.pairs import configured

HOSTS = tuple(StaticNode(name=f"h{place}", address=f"127.0.0.{place}") for place in (1, 2, 3))
START_SECONDS = 1800.0


def split(kind: str) -> dict[str, Any]:
    """A pool of FSDP and two servers."""
    server = msgspec.structs.replace(setup_of(kind), servers=2)
    return {"mode": "split", "trainer": "fsdp", "ranks": RanksSetup(), "engine": kind, "server": server}


@pytest.mark.long
def test_a_lost_node_costs_no_version(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version is attested on every server, by its node's copy."""
    monkeypatch.setattr(pool_kit, "DEADLINE", START_SECONDS)
    nodes = NodesSetup(nodes=1, rollout_nodes=2, hosts=HOSTS)
    with running_pool(tmp_path, **split(kind), nodes=nodes) as running, running.connect("a") as driver:
        driver.call("open", OPEN)
        learn(driver)
        publish(driver, tmp_path / "versions", 1)
        assert generate(driver, "a@1")
        for server, node in ((0, "h2"), (1, "h3")):
            assert (tmp_path / f"engine-{server}.log").read_text().startswith(f"{node}: ")
        granted = msgspec.json.decode((tmp_path / GRANT).read_bytes(), type=GrantStatus).nodes
        copies = [Path(node.directory) / "adapters" for node in granted]
        assert [len(list(copy.iterdir())) for copy in copies] == [0, 1, 1]
        os.kill(granted[2].pid, signal.SIGKILL)
        fleet = running.pool.engine._fleet  # type: ignore[attr-defined]
        until(lambda: [server.state for server in fleet.servers] == ["up", "failed"])
        learn(driver)
        publish(driver, tmp_path / "versions", 2)
        assert generate(driver, "a@2") and generate(driver, "a@1")


@pytest.mark.long
def test_a_killed_server_apart_costs_no_version(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others serve what was published while it was away, and it has that too once it is back."""
    monkeypatch.setattr(pool_kit, "DEADLINE", START_SECONDS)
    devices = ("cpu:0", "cpu:1", "cpu:2")
    with (
        running_pool(tmp_path, **split(kind), devices=devices, rollout_devices=2) as running,
        running.connect("a") as driver,
    ):
        driver.call("open", OPEN)
        learn(driver)
        publish(driver, tmp_path / "versions", 1)
        fleet = running.pool.engine._fleet  # type: ignore[attr-defined]
        os.kill(fleet.servers[1].process.pid, signal.SIGKILL)
        until(lambda: fleet.servers[1].state != "up")
        assert generate(driver, "a@1")
        learn(driver)
        publish(driver, tmp_path / "versions", 2)
        until(lambda: fleet.servers[1].state == "up")
        assert generate(driver, "a@2") and generate(driver, "a@1")


STEPS, SERVER_KILLED, TRAINER_KILLED = 10, 3, 6
SPEC = f"""
seed: 5
lora: {{rank: 8}}
data: {{train: sort, prompts_per_step: 4}}
trainer: {{backend: fsdp, dp: 2, lr: 2.0e-3, steps: {STEPS}}}
rollout: {{servers: 2, max_staleness: 1, max_new_tokens: 12}}
pool: {{mode: split}}
eval: {{every: 0}}
checkpoint: {{every: 2}}
"""


def processes(made: World, run: str, words: str) -> list[psutil.Process]:
    """Those that the run's pool has started with these words in their command, without their guards."""
    pool = psutil.Process(made.pid(run, "pool"))
    commands = {p: " ".join(p.cmdline()) for p in pool.children(recursive=True)}
    return [p for p, command in commands.items() if words in command and "guard.py" not in command]


def reached(made: World, run: str, step: int) -> None:
    """Also ends when the run does, so that a run that failed is not waited for."""

    def look() -> bool:
        shown = made.client.show(run)
        return shown.step >= step or shown.state == "ended"

    made.until(look, f"{run} at step {step}")
    shown = made.client.show(run)
    assert shown.step >= step, shown.detail


@pytest.mark.long
def test_kills_cost_a_split_run_only_time(kind: str) -> None:
    """On four slots: two ranks and two servers; steps overlap, before the kills and after them.

    A resume has the weights of its checkpoint. vLLM also gives the bits of a run that nobody disturbs; those
    of SGLang depend on what else is in a batch, and on what its cache has.
    """
    with world() as made:
        made.home.root.mkdir(parents=True)
        config = {"devices": {"cpu_slots": 4}, "backends": configured(kind)}
        made.home.config.write_text(json.dumps(config))  # YAML has JSON in it
        how = (made.spec(SPEC), f"rollout.backend={kind}")
        made.lorad("run", *how, "--name", "calm", "--detach")
        made.completed("calm")
        made.lorad("run", *how, "--name", "struck", "--detach")
        reached(made, "struck", SERVER_KILLED)
        servers = processes(made, "struck", f"{kind}/launch.py")
        os.kill(servers[0].pid, signal.SIGKILL)
        reached(made, "struck", TRAINER_KILLED)
        assert len(made.client.show("struck").attempts) == 1, "the loss of a server must not end the run"
        os.kill(processes(made, "struck", "lorad.trainers.ranks.worker")[-1].pid, signal.SIGKILL)
        assert made.over("struck").reason == "lost"
        made.lorad("resume", "struck", "--detach")
        assert len(made.completed("struck").attempts) == 2
        for run in ("calm", "struck"):
            assert {version.attested for version in made.client.adapters(run)} == {"passed"}
            steps = timeline([record for record, _ in read(made.home.run(run).journal)])
            assert len(steps) == STEPS and sum(part.together > 0 for part in steps) > STEPS / 2
        records = [record for record, _ in read(made.home.run("struck").journal)]
        begun = [r.data["resumed_from"] for r in records if r.kind == "attempt"][-1]
        again = [r.data["sha256"] for r in records if (r.kind, r.step) == ("version", begun)]
        assert begun >= 2 and len(again) == 2 and len(set(again)) == 1
        if kind == "vllm":
            assert made.facts("struck") == made.facts("calm")
