"""A cluster without tokens, and one of another user, on a host of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host
from tests.cluster.ray_kit import PYTHON, Cluster, asked, granted

OTHER = 4242  # a user id; it keeps the right to read root's files, so that it can run Ray
AS_OTHER = ("setpriv", f"--reuid={OTHER}", "--inh-caps=+dac_override", "--ambient-caps=+dac_override", "--")


@pytest.fixture(scope="module")
def open_cluster(machines: list[Host], work: Path) -> Iterator[Cluster]:
    if not PYTHON:
        pytest.skip("LORAD_RAY_PYTHON names no interpreter: `make test-cluster` installs Ray")
    made = Cluster(machines[3:], work, is_open=True)
    made.start_head("--num-cpus=2")
    yield made
    made.stop(made.home, force=True)


def test_a_cluster_without_tokens_is_refused(open_cluster: Cluster) -> None:
    with asked(open_cluster, "open@1", nodes=1, devices=0) as grant:
        said = grant.until("Refused")
    assert said["words"].startswith(f"the Ray cluster at {open_cluster.address} asks for no token")
    assert "cluster.insecure: true" in said["hint"]


def test_who_insists_gets_the_open_cluster(open_cluster: Cluster) -> None:
    with granted(open_cluster, "insist@1", nodes=1, devices=0, insecure=True) as (_, nodes):
        assert [(node["node"], node["devices"]) for node in nodes] == [("h3", [])]


def test_another_users_cluster_is_refused(open_cluster: Cluster) -> None:
    with asked(
        open_cluster, "uid@1", nodes=1, devices=0, insecure=True, token_file="", wrap=AS_OTHER
    ) as grant:
        said = grant.until("Refused")
    assert said["words"] == f"the cluster is user 0's on h3, and this pool user {OTHER}'s"
