"""vLLM behind the engine protocol."""

from __future__ import annotations

from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.vllm.dialect import VllmDialect


class VllmEngine(RemoteEngine):
    """One or several vLLM servers."""

    dialect = VllmDialect
