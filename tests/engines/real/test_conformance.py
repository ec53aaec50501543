"""The real SGLang and the real vLLM keep the rules of every engine."""

from tests.conformance.engine_suite import EngineSuite


class TestServers(EngineSuite):
    """The engine suite with the `engine` and `shapes` of this folder:
    each test once for each kind of server.
    """
