"""The form in which servers read adapters on experts: whole layers, and the same change of the base."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.adapters.adapter import Adapter
from lorad.adapters.served import served
from lorad.adapters.targets import EXPERTS, experts_of, leaf
from lorad.backends.registry import SERVERS, dialect_class
from lorad.backends.setup import targets
from lorad.models.directory import linear_shapes, read_config, resolve
from tests.kit.fakes.random_adapters import partial, random_adapter

SHAPES = linear_shapes(read_config(resolve("builtin:tiny-moe")))
WHOLE = random_adapter(SHAPES, 1, rank=2)
OF_EXPERTS = {leaf(name) for name in SHAPES if experts_of(name)}
DENSE = {leaf(name) for name in SHAPES if not experts_of(name)}
ADAPTERS = st.builds(
    lambda modules, rslora: partial(WHOLE, modules, rslora=rslora),
    st.sets(st.sampled_from(WHOLE.config.modules), min_size=1, max_size=6),
    st.booleans(),
)


def form_of(adapter: Adapter, kind: str) -> Adapter:
    return served(adapter, SHAPES, dialect_class(kind).joined, "float32")


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
    assert not form.config.rslora and form.config.rank == adapter.config.rank
    assert form.config.scale == pytest.approx(adapter.config.scale)
    for name, tensor in form.tensors.items():
        expected = adapter.tensors.get(name)
        assert not tensor.any() if expected is None else np.array_equal(tensor, expected)
        assert tensor.shape == WHOLE.tensors[name].shape


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
