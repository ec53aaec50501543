"""The form in which servers read adapters on experts: whole layers, and the same change of the base."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorad.adapters.adapter import Adapter
from lorad.adapters.served import served
from lorad.adapters.targets import EXPERTS, experts_of, leaf
from lorad.backends.setup import targets
from lorad.engines.base import AdapterSource
from lorad.engines.builtin.engine import BuiltinEngine
from lorad.models.compute import Compute
from lorad.models.loading import load_base
from lorad.servers.table import SERVERS
from tests.conformance.expert_adapters import BATCH, MOE, SHAPES, adapter_of, merged_logprobs
from tests.kit.fakes.random_adapters import partial, random_adapter

WHOLE = random_adapter(SHAPES, 1, rank=2)
BY_RANK = {rank: random_adapter(SHAPES, 1, rank=2, expert_rank=rank) for rank in (1, 2, 3)}
JOINED = {kind: SERVERS[kind].joined for kind in SERVERS}
OF_EXPERTS = {leaf(name) for name in SHAPES if experts_of(name)}
DENSE = {leaf(name) for name in SHAPES if not experts_of(name)}
ADAPTERS = st.builds(
    lambda modules, rslora, rank: partial(BY_RANK[rank], modules, rslora=rslora),
    st.sets(st.sampled_from(WHOLE.config.modules), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([*BY_RANK]),
)


def form_of(adapter: Adapter, kind: str) -> Adapter:
    return served(adapter, SHAPES, JOINED[kind], "float32")


@pytest.mark.parametrize("kind", sorted(SERVERS))
@given(adapter=ADAPTERS)
def test_form_has_whole_layers_of_experts(kind: str, adapter: Adapter) -> None:
    touched = {experts_of(module) for module in adapter.config.modules} - {""}
    wanted = {name for name in SHAPES if experts_of(name) in touched}
    form = form_of(adapter, kind)
    assert {name for name in form.config.modules if experts_of(name)} == wanted
    needed = {leaf(name) for name in form.config.modules} | ({EXPERTS} if touched else set())
    assert needed <= set(targets(adapter.config.modules, DENSE, OF_EXPERTS))


@pytest.mark.parametrize("kind", sorted(SERVERS))
@given(adapter=ADAPTERS)
def test_form_changes_what_its_version_changes(kind: str, adapter: Adapter) -> None:
    form = form_of(adapter, kind)
    config = form.config
    assert not config.rslora and config.expert_rank is None
    assert config.rank == max(map(adapter.config.rank_of, adapter.config.modules))
    assert all(min(tensor.shape) == config.rank for tensor in form.tensors.values())
    for module in config.modules:
        change = config.alpha / config.rank * np.matmul(*halves(form, module))
        if module in adapter.config.modules:
            expected = adapter.config.scale_of(module) * np.matmul(*halves(adapter, module))
            np.testing.assert_allclose(change, expected, rtol=1e-5, atol=1e-6)
        else:
            assert not change.any()


def halves(adapter: Adapter, module: str) -> tuple[np.ndarray, np.ndarray]:
    """B and A."""
    return adapter.tensors[f"{module}.lora_B.weight"], adapter.tensors[f"{module}.lora_A.weight"]


def test_whole_adapter_is_its_own_form() -> None:
    assert all(form_of(WHOLE, kind) is WHOLE for kind in SERVERS)


def test_attention_of_a_mixture_has_no_experts() -> None:
    attention = [name for name in SHAPES if not experts_of(name)]
    form = form_of(partial(WHOLE, attention), "sglang")
    assert set(form.config.modules) == set(attention)
    assert targets(attention, DENSE, OF_EXPERTS) == ("k_proj", "o_proj", "q_proj", "v_proj")


def test_servers_of_experts_are_shared() -> None:
    expected = tuple(sorted({*DENSE, *OF_EXPERTS, EXPERTS}))
    one = ["model.layers.0.mlp.experts.1.up_proj"]
    assert targets(SHAPES, DENSE, OF_EXPERTS) == targets(one, DENSE, OF_EXPERTS) == expected


def test_mlp_beside_experts_is_a_target_where_adapted() -> None:
    linears = {*DENSE, *OF_EXPERTS, "lm_head"}  # some layer has a dense MLP
    attention = ["model.layers.0.self_attn.q_proj"]
    assert not OF_EXPERTS & set(targets(attention, linears, OF_EXPERTS))
    assert set(targets(["model.layers.0.mlp.up_proj"], linears, OF_EXPERTS)) == DENSE | OF_EXPERTS
    assert not OF_EXPERTS & set(targets(attention, linears, ["gate_up_proj"]))


@pytest.mark.parametrize("name", ["all", "low-rank-experts", "low-rank-rslora", "low-rank-up"])
async def test_builtin_engine_serves_merged_experts(name: str, tmp_path: Path) -> None:
    compute, adapter = Compute(), adapter_of(name)
    engine = BuiltinEngine(load_base(MOE, torch.float32, torch.device("cpu")), compute, MOE)
    await engine.load("run@1", AdapterSource(adapter.digest(), adapter=adapter))
    expected = merged_logprobs(adapter, tmp_path / "merged")
    assert np.abs(await engine.score("run@1", BATCH) - expected).max() < 1e-4
    await engine.close()
    compute.close()
