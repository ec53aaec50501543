"""One Ray cluster over three hosts of this machine for all tests here.

`make test-cluster` installs Ray. Without it, or without root, the tests skip.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, can_be_made, hosts
from tests.cluster.measured import Measured
from tests.cluster.ray_kit import PYTHON, Cluster
from tests.kit.world import REPOSITORY


@pytest.fixture(scope="session")
def work() -> Iterator[Path]:
    """A directory that this process and the homes of clusters see, and no node."""
    directory = Path(tempfile.mkdtemp(prefix="lr-cl-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def machines(work: Path) -> Iterator[list[Host]]:
    if not can_be_made():
        pytest.skip(
            "hosts on one machine need root, unshare, nsenter and ip, in a kernel that allows namespaces"
        )
    programs = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *Path(PYTHON).parents[1:2]]
    with hosts(4, [work], homes=(0, 3), programs=programs) as made:
        yield made


@pytest.fixture(scope="session")
def cluster(machines: list[Host], work: Path) -> Iterator[Cluster]:
    if not PYTHON:
        pytest.skip("LORAD_RAY_PYTHON names no interpreter: `make test-cluster` installs Ray")
    made = Cluster(machines[:3], work)
    made.start()
    yield made


@pytest.fixture(scope="session")
def measured() -> Measured:
    """The times of faults, which are kept where that is asked for."""
    return Measured()


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long)])
def turn(request: pytest.FixtureRequest) -> int:
    """Which time it is: each fault is made twice."""
    number: int = request.param
    return number
