"""SGLang behind the engine protocol."""

from __future__ import annotations

from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.sglang.dialect import SglangDialect


class SglangEngine(RemoteEngine):
    """One or several SGLang servers."""

    dialect = SglangDialect
