"""One pool for a test file, and a run of its own for each test."""

from collections.abc import Iterator

import pytest

from lorad.protocol.connection import Connection
from tests.kit.pool_kit import OPEN, Running, running_pool


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def run(request: pytest.FixtureRequest, running: Running) -> Iterator[Connection]:
    """A run of this test's own, with an open slot."""
    with running.connect(request.node.originalname[5:60].replace("_", "-")) as connection:
        connection.call("open", OPEN)
        yield connection
