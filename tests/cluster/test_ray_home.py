"""Runs of a real home over a Ray cluster: its daemon dies, a node is cut off, home loses its power."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lorad.box.paths import Home
from lorad.client.client import Client
from tests.cluster.faults import AGENT, ALL, RANK, pids, send
from tests.cluster.hosts import Host
from tests.cluster.measured import Measured
from tests.cluster.ray_kit import PYTHON, Cluster, nothing_left_on
from tests.kit.world import REPOSITORY, World, world
from tests.nodes.spread import NAME, SPEC, reached, start, steps_of

STEPS, SECONDS = 10, 600.0
CUT_SECONDS = 40.0  # many times the lease
DAEMON, POOL = "-m lorad.daemon", "-m lorad.pool"
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("turn")]


class RayWorld(World):
    """A world whose `lorad` runs on the home host of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.root = Path(tempfile.mkdtemp(prefix="w", dir=cluster.work))
        self.home = Home(self.root / "home")
        self.client = Client(self.home)
        self.home.root.mkdir(mode=0o700)
        own = {"kind": "ray", "address": cluster.address, "python": PYTHON, "device": "cpu", "lease": 5}
        own |= {"token_file": str(cluster.token_file), "node_python": sys.executable}
        self.home.config.write_text(json.dumps({"cluster": own}))

    @property
    def env(self) -> dict[str, str]:
        return {"LORAD_HOME": str(self.home.root), "PYTHONPATH": str(REPOSITORY)}

    def command(self, *arguments: object) -> str:
        return self._cluster.home.run(sys.executable, "-m", "lorad", *map(str, arguments), env=self.env)


@contextmanager
def ray_world(cluster: Cluster) -> Iterator[RayWorld]:
    made = RayWorld(cluster)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The facts of the run on one machine, undisturbed."""
    with world() as made:
        made.run(NAME, text=SPEC.format(steps=STEPS))
        return made.facts(NAME)


def begun(made: RayWorld, steps: int = STEPS) -> None:
    made.command("daemon", "start")
    start(made, steps)
    reached(made, 1, 3)


def test_a_daemon_may_die_under_a_run(cluster: Cluster, expected: dict[str, Any], measured: Measured) -> None:
    """Nothing else does; the next daemon finds the run where it is."""
    with ray_world(cluster) as made:
        begun(made)
        ranks = [pid for node in cluster.nodes for pid in pids(node, RANK)]
        send(cluster.home, DAEMON)
        reached(made, 1, 6)
        assert [pid for node in cluster.nodes for pid in pids(node, RANK)] == ranks and len(ranks) == 2
        made.command("daemon", "start")
        assert made.completed(NAME, SECONDS).attempt == 1 and made.facts(NAME) == expected
    measured.add(
        "kill -9 of the daemon at home", "it is not told", "nothing else ends; the next one adopts it"
    )


def test_a_run_outlives_a_partition(cluster: Cluster, machines: list[Host], expected: dict[str, Any]) -> None:
    """Both sides end what they have; no step is made until the node is back, and the run resumes then."""
    cut = cluster.nodes[1]
    with ray_world(cluster) as made:
        begun(made)
        began = time.monotonic()
        cut.part()
        try:
            made.until(lambda: not pids(cluster.home, POOL), "end of the pool", 60)
            nothing_left_on(machines, ALL)
            gone = time.monotonic() - began
            steps = steps_of(made, 1)
            time.sleep(max(0.0, began + CUT_SECONDS - time.monotonic()))
        finally:
            cut.heal()
            cluster.stop(cut, force=True)
            between = steps_of(made, 2)
            cluster.join([cut])
        assert gone < 15 and steps_of(made, 1) == steps and not between
        assert made.completed(NAME, SECONDS).attempt == 2 and made.facts(NAME) == expected
        assert steps_of(made, 1) == steps


def test_ray_may_be_stopped_under_a_run(cluster: Cluster) -> None:
    """The run stops after its step, and resumes once there are nodes; no step is made twice."""
    with ray_world(cluster) as made:
        begun(made, 1000)
        began = time.monotonic()
        cluster.stop(cluster.nodes[1])
        made.until(lambda: not pids(cluster.nodes[1], AGENT), "end of the agent", 120)
        gone = time.monotonic() - began
        cluster.join([cluster.nodes[1]])
        last = steps_of(made, 1)[-1]
        reached(made, 2, last + 2)
        assert steps_of(made, 2)[0] == last + 1
        assert made.client.show(NAME).attempts[0].reason == "stopped"
    print(f"`ray stop`: the run has stopped, and nothing is left there, after {gone:.1f} s")


def test_home_may_lose_its_power(
    cluster: Cluster, machines: list[Host], expected: dict[str, Any], measured: Measured
) -> None:
    """It comes back with another boot id and a new Ray cluster; the next daemon resumes the run."""
    with ray_world(cluster) as made:
        begun(made)
        began = time.monotonic()
        cluster.home.cut()
        nothing_left_on(machines, ALL)
        gone = time.monotonic() - began
        for node in cluster.nodes:
            cluster.stop(node, force=True)
        cluster.home.boot()
        cluster.start()
        made.command("daemon", "start")
        assert made.completed(NAME, SECONDS).attempt == 2 and made.facts(NAME) == expected
    measured.add("power cut of home, with Ray's head", "it is the pool itself", gone)
