"""The real SGLang and the real vLLM keep the rules of every engine."""

import pytest

from tests.conformance.engine_suite import EngineSuite


@pytest.mark.usefixtures("server")
def test_a_kind_of_server_has_one_worker(request: pytest.FixtureRequest, kind: str) -> None:
    """Each worker would start every server else."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("all tests run in one process, or not by --dist loadgroup")
    assert request.node.nodeid.endswith(f"@{kind}")


class TestServers(EngineSuite):
    """The engine suite with the `engine` and `shapes` of this folder:
    each test once for each kind of server.
    """
