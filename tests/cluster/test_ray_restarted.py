"""A Ray cluster with a dashboard and storage on disk: an outage of its head, and runs that are its jobs."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.faults import ALL, GCS, pids
from tests.cluster.hosts import Host
from tests.cluster.measured import Measured
from tests.cluster.ray_kit import Cluster, Head, granted, nothing_left_on
from tests.cluster.test_ray_home import DAEMON, POOL, ray_world
from tests.nodes.spread import NAME, SPEC, steps_of

pytestmark = pytest.mark.long
OUTAGE_SECONDS = 15.0


@pytest.fixture(scope="module")
def stored(cluster: Cluster, work: Path) -> Iterator[Cluster]:
    """The cluster, started anew."""
    database = tempfile.mkdtemp(prefix="gcs", dir=work)
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": database}
    with cluster.anew(dashboard=True, **storage):
        yield cluster


def _again(host: Host, mark: str, seconds: float) -> None:
    """Kill a process, and start it as it was so much later."""
    (pid,) = pids(host, mark)
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")[:-1]
    os.kill(pid, signal.SIGKILL)
    time.sleep(seconds)
    null, env = subprocess.DEVNULL, dict(line.split("=", 1) for line in environment)
    assert not host.start("setsid", "--fork", *command, env=env, stdout=null, stderr=null).wait()


@pytest.mark.usefixtures("turn")
def test_an_outage_of_the_head_goes_unnoticed(
    stored: Cluster, machines: list[Host], measured: Measured
) -> None:
    """Another pool is granted nodes as soon as it is back."""
    head = Head(stored)
    try:
        assert head.line()["kind"] == "ready"
        _again(stored.home, f"gcs/{GCS}", OUTAGE_SECONDS)
        with pytest.raises(queue.Empty):
            head.line(30)  # it would say that it ended
    finally:
        head.end()
    nothing_left_on(machines, ALL)
    with granted(stored, f"after{time.monotonic_ns()}@1"):
        pass
    measured.add("kill -9 of the GCS (RocksDB), back after 15 s", "it does not notice", "the pool trains on")


def test_a_run_may_be_a_ray_job(stored: Cluster, machines: list[Host]) -> None:
    """Its exit code is the job's, and nothing is left."""
    with ray_world(stored) as made:
        spec = made.spec(SPEC.format(steps=2))
        runs = [sys.executable, "-m", "lorad", "job", str(spec), "--name", NAME]
        env = [f"{name}={value}" for name, value in made.env.items()]
        submit = ["job", "submit", "--address", stored.dashboard, "--", "env", *env, *runs]
        code, said = stored.ray(*submit, "resources.nodes=2")
        assert code == 0 and "ended (completed) at step 2" in said, said
        code, said = stored.ray(*submit, "resources.nodes=2", "trainer.dp=3", "--name", "other")
        assert code == 1 and "resources.nodes" in said, said
        nothing_left_on(machines, [*ALL, DAEMON, POOL])


def test_a_stopped_ray_job_resumes(stored: Cluster, machines: list[Host]) -> None:
    """`ray job stop` stops the run after its step, with a checkpoint; the same command resumes it."""
    with ray_world(stored) as made:
        spec = made.spec(SPEC.format(steps=2000).replace("every: 2}", "every: 1000}"))
        runs = [sys.executable, "-m", "lorad", "job", str(spec), "--name", NAME, "resources.nodes=2"]
        env = [f"{name}={value}" for name, value in made.env.items()]
        waits = '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}'
        submit = ["job", "submit", "--address", stored.dashboard, "--no-wait", "--runtime-env-json", waits]

        def begin(job: str, attempt: int, step: int) -> None:
            code, said = stored.ray(*submit, "--submission-id", job, "--", "env", *env, *runs)
            assert code == 0, said
            made.until(lambda: max(steps_of(made, attempt), default=0) >= step, f"step {step}", 240)

        def stop(job: str) -> str:
            code, said = stored.ray("job", "stop", "--address", stored.dashboard, job)
            assert code == 0, said
            nothing_left_on(machines, [*ALL, DAEMON, POOL], 60)
            return stored.ray("job", "logs", "--address", stored.dashboard, job)[1]

        begin("first", 1, 3)
        said = stop("first")
        last = steps_of(made, 1)[-1]
        assert f"{NAME} is paused at step {last}" in said, said
        begin("second", 2, last + 2)
        stop("second")
        assert steps_of(made, 2)[0] == last + 1  # no step is made twice
