"""Routes of mixtures: what cannot record or replay them is said before anything starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from lorad.backends.setup import server_setup
from lorad.box.config import Backend
from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.models.facts import ModelFacts, read_facts
from lorad.preflight.routes import check_routes, records_routes
from lorad.protocol.preflight import BaseFacts
from lorad.routes import RouteShape
from lorad.spec.model import Spec, convert
from tests.kit.fakes.foreign_models import make_moe

MIXTURE = read_facts(resolve("builtin:tiny-moe"))
DENSE = read_facts(resolve("builtin:tiny"))


def spec(routes: str, dtype: str = "bfloat16", **more: Any) -> Spec:
    rollout = {"routes": routes, **more.pop("rollout", {})}
    return convert({"data": {"train": "sort"}, "model": {"dtype": dtype}, "rollout": rollout, **more})


def of_type(model_type: str) -> ModelFacts:
    return replace(MIXTURE, model_type=model_type)


@pytest.mark.parametrize(
    ("given", "facts", "says"),
    [
        ({}, DENSE, "no mixture"),
        ({"trainer": {"backend": "megatron"}}, of_type("olmoe"), "megatron replays no routes of olmoe"),
        ({"trainer": {"backend": "fsdp"}}, of_type("glm4_moe"), "fsdp replays no routes of glm4_moe"),
        ({"algorithm": "sft"}, MIXTURE, "sft trains on no samples"),
        ({"rollout": {"backend": "vllm"}}, MIXTURE, "lorad records no routes of vllm"),
        ({"rollout": {"backend": "sglang", "url": "http://a:1"}}, MIXTURE, "of servers that you run"),
        ({"rollout": {"backend": "sglang"}}, replace(MIXTURE, layers=4), "where every layer has experts"),
    ],
)
def test_record_is_refused_where_nothing_can(given: dict[str, Any], facts: ModelFacts, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        check_routes(spec("record", **given), facts)
    assert refused.value.key == "rollout.routes" and refused.value.hint
    assert not records_routes(spec("auto", **given), facts)


def test_auto_warns_where_bfloat16_needs_it() -> None:
    trained: dict[str, Any] = {"trainer": {"backend": "megatron"}}
    other = of_type("olmoe")
    (warning,) = check_routes(spec("auto", **trained), other)
    assert "megatron replays no routes of olmoe" in warning and "qwen3_moe" in warning
    for quiet in (spec("auto", "float32", **trained), spec("off", **trained), spec("auto")):
        assert check_routes(quiet, other) == []
    assert check_routes(spec("auto", **trained), MIXTURE) == []
    assert check_routes(spec("auto"), DENSE) == []


def test_auto_is_record_in_bfloat16_alone() -> None:
    found = {
        (routes, dtype): records_routes(spec(routes, dtype), MIXTURE)
        for routes in ("auto", "record", "off")
        for dtype in ("float32", "bfloat16")
    }
    assert [key for key, records in found.items() if records] == [
        ("auto", "bfloat16"), ("record", "float32"), ("record", "bfloat16"),
    ]  # fmt: skip


def test_servers_are_started_for_routes_that_they_say() -> None:
    wanted = spec("auto", rollout={"backend": "sglang"})
    assert records_routes(wanted, MIXTURE)
    facts, backend = BaseFacts(modules=["l.0.q_proj"], routes=True), Backend(python=Path("/python"))
    assert server_setup(wanted, backend, facts, Path()).routes
    assert not server_setup(wanted, backend, replace_struct(facts, routes=False), Path()).routes


def test_shapes_of_routes_are_read_off_any_model(tmp_path: Path) -> None:
    make_moe(tmp_path)
    assert read_facts(tmp_path).routes == RouteShape(layers=2, experts=4, per_token=1)
    assert MIXTURE.routes == RouteShape(layers=3, experts=4, per_token=2) and DENSE.routes is None
