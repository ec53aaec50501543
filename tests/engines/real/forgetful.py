"""A vLLM that is started without what makes it take adapters on experts."""

from pathlib import Path

import msgspec

from lorad.adapters.targets import EXPERTS
from lorad.engines.remote.dialect import ServerSettings
from lorad.engines.vllm.dialect import VllmDialect, VllmEngine


class _Dialect(VllmDialect):
    def command(self, python: str, settings: ServerSettings, socket: Path) -> list[str]:
        kept = tuple(name for name in settings.targets if name != EXPERTS)
        return super().command(python, msgspec.structs.replace(settings, targets=kept), socket)


class ForgetsExperts(VllmEngine):
    """Loads every adapter, and serves those of experts as the base."""

    dialect = _Dialect
