"""What servers were not started for is refused before they see it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorad.adapters.targets import match_modules
from lorad.engines.base import AdapterSource
from lorad.engines.remote.dialect import ServerSettings
from lorad.engines.remote.holdings import Holdings
from lorad.engines.remote.transport import ServerTransport
from lorad.engines.vllm.dialect import VllmDialect
from lorad.errors import AdapterRefused
from lorad.models.directory import linear_shapes, read_config, resolve
from tests.kit.fakes.random_adapters import partial, random_adapter

MOE = resolve("builtin:tiny-moe")
SHAPES = linear_shapes(read_config(MOE))
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
MLP = ("down_proj", "gate_proj", "up_proj")


def holdings(targets: tuple[str, ...], work: Path) -> Holdings:
    """Of servers that are never asked."""
    sizes: dict[str, Any] = {"context_length": 64, "max_rank": 8, "slots": 2, "max_versions": 4}
    settings = ServerSettings(
        model=MOE, dtype="float32", device="cpu", targets=targets, memory_fraction=0.5, **sizes
    )
    fleet: Any = SimpleNamespace(is_attached=False, dialect=VllmDialect())
    return Holdings(fleet, settings, SHAPES, ServerTransport(work, "base"))


@pytest.mark.parametrize("targets", [ATTENTION, (*ATTENTION, *MLP)])
async def test_experts_need_servers_started_for_them(targets: tuple[str, ...], tmp_path: Path) -> None:
    experts = match_modules(SHAPES, "*.experts.1.up_proj")
    adapter = partial(random_adapter(SHAPES, 1, 4), experts)
    held = holdings(targets, tmp_path)
    with pytest.raises(AdapterRefused, match="servers were started for") as refused:
        await held.add("run@1", AdapterSource(adapter.digest(), adapter=adapter))
    assert "mlp.experts.0." in str(refused.value) and not held.versions.table
    held.close()
