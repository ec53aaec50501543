"""What a backend cannot do is refused before a run starts and where it starts, in the same words."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.targets import HEAD
from lorad.backends.registry import dialect_class
from lorad.backends.setup import backend_setup
from lorad.engines.base import AdapterSource
from lorad.engines.remote.dialect import ServerSettings
from lorad.engines.remote.holdings import Holdings
from lorad.engines.remote.transport import ServerTransport
from lorad.errors import AdapterRefused, LoradError, SpecError
from lorad.limits.check import refuse
from lorad.limits.limit import BackendLimit, BackendSetup
from lorad.limits.of_engines import OF_ENGINES
from lorad.limits.of_trainers import OF_TRAINERS
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.pool import host
from lorad.protocol.pool_setup import PoolSetup, RanksSetup
from lorad.spec.model import Spec, convert
from lorad.trainers.base import OpenSlot, SlotSpec
from lorad.trainers.fsdp.body import open_body as open_fsdp
from lorad.trainers.megatron.body import open_body as open_megatron
from lorad.trainers.sharded.body import BodySettings
from lorad.trainers.sharded.trainer import RankTrainer
from tests.kit.fakes.random_adapters import random_adapter

TINY, MOE = resolve("builtin:tiny"), resolve("builtin:tiny-moe")
Q, EXPERT = ("model.layers.0.self_attn.q_proj",), ("model.layers.0.mlp.experts.0.up_proj",)
DORA, DROPOUT = {"lora": {"dora": True}}, {"lora": {"dropout": 0.1}}


@dataclass(frozen=True)
class Case:
    """What breaks a limit of a trainer of ranks. modules: of its adapter, where that breaks it. kind: of the
    model, where the tiny ones are of another.
    """

    trainer: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] | None = None
    model: Path = TINY
    kind: str = ""
    device: str = "cpu"

    @property
    def spec(self) -> Spec:
        dtype = {"dtype": "float32" if self.device == "cpu" else "bfloat16"}
        return convert(
            {**self.more, "model": {**self.more.get("model", {}), **dtype}, "trainer": self.trainer}
        )

    @property
    def adapter(self) -> AdapterConfig | None:
        lora = self.spec.lora
        if self.modules is None:
            return None
        return AdapterConfig(lora.rank, 16.0, self.modules, dropout=lora.dropout, dora=lora.dora)


def fsdp(**trainer: Any) -> dict[str, Any]:
    return {"backend": "fsdp", **trainer}


def megatron(**trainer: Any) -> dict[str, Any]:
    return {"backend": "megatron", **trainer}


CASES = [
    *(Case(fsdp(**{axis: 2})) for axis in ("tp", "pp", "ep")),
    Case(megatron(cp=2)),
    Case(fsdp(backend_args={"colour": "red"})),
    Case(fsdp(backend_args={"attn_implementation": 1})),
    Case(fsdp(cp=2, backend_args={"attn_implementation": "sdpa"})),
    Case(megatron(backend_args={"bf16": True})),
    Case(megatron(backend_args={"sequence_parallel": True})),
    Case(megatron(backend_args={"transformer_layer_spec": "own"})),
    Case(megatron(tp=2), {"lora": {"rank": 3}}, Q),
    Case(megatron(tp=2, ep=4), model=MOE),
    Case(megatron(pp=2), {"algorithm": "ppo"}, Q),
    Case(megatron(), {"model": {"quantize": "fp8"}}),
    Case(fsdp(cp=3)),
    Case(megatron(tp=4)),
    *(Case(megatron(), kind=kind) for kind in ("smollm3", "olmo3", "qwen3_5", "gemma3_text", "deepseek_v3")),
    Case(megatron(pp=5)),
    Case(megatron(dp=2, ep=2)),
    Case(megatron(dp=3, ep=3), model=MOE),
    Case(megatron(), DORA, Q),
    Case(fsdp(), DORA, EXPERT, MOE),
    Case(fsdp(), {"lora": {"dora": True, "dropout": 0.1}}, Q),
    Case(fsdp(), {}, EXPERT, MOE, "another_moe"),
    Case(megatron(), {}, EXPERT, MOE, "another_moe"),
    Case(megatron(), {"lora": {"type": "lora"}}, Q),
    Case(megatron(), {}, EXPERT, MOE, device="cuda:0"),
    Case(megatron(tp=2, ep=2), DROPOUT, EXPERT, MOE),
]
BUILTIN = "the {s.trainer} trainer is one process", "the {s.trainer} trainer takes none"
IN_POOLS = [
    {"pool": {"mode": "fused"}, "trainer": fsdp()},
    {"pool": {"mode": "fused"}, "rollout": {"backend": "vllm"}},
    {"pool": {"mode": "timesliced"}, "trainer": fsdp()},
    {"pool": {"mode": "timesliced"}},
    {"model": {"quantize": "nf4"}, "rollout": {"backend": "sglang"}},
    {"pool": {"mode": "fused"}, "rollout": {"backend": "transformers"}},
    {"pool": {"mode": "fused"}, "rollout": {"backend": "transformers"}, "trainer": fsdp(dp=2)},
    {"pool": {"mode": "timesliced"}, "rollout": {"backend": "transformers"}},
    {"model": {"quantize": "nf4"}, "rollout": {"backend": "transformers"}},
]
"""Specs that a pool refuses before trainer and engine start."""
_PAIR = (f"{HEAD}.lora_A.weight", f"{HEAD}.lora_B.weight")
ON_SERVERS = [
    ("sglang", random_adapter({Q[0]: (4, 4)}, 1, dora=True), ""),
    ("sglang", random_adapter({"model.layers.0.mlp.dense_h_to_4h": (4, 4)}, 1), ""),
    ("sglang", random_adapter({"model.layers.0.linear_attn.in_proj_a": (4, 4)}, 1), "qwen3_5"),
    ("sglang", random_adapter({Q[0]: (4, 4)}, 1), "qwen3_next"),
    ("sglang", random_adapter({Q[0]: (4, 4)}, 1), "gemma4"),
    ("vllm", random_adapter({Q[0]: (4, 4)}, 1), "nemotron_h"),
    ("vllm", Adapter(AdapterConfig(4, 8.0, (HEAD,)), dict.fromkeys(_PAIR, np.zeros((4, 4), np.float32))), ""),
]
"""Adapters that an engine refuses, by its name, and the type of the model, where it is of another."""


def of_kind(model: Path, kind: str, tmp_path: Path) -> Path:
    """Return the directory of a model, or of a copy whose config.json has another type."""
    if not kind:
        return model
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "model_type": kind}))
    return tmp_path / "model"


def words(error: LoradError) -> tuple[str, str]:
    return error.message, error.hint


def refused_before(setup: BackendSetup) -> tuple[str, str]:
    with pytest.raises(SpecError) as refused:
        refuse(setup)
    assert refused.value.key and refused.value.hint
    return words(refused.value)


def refused_by_ranks(case: Case, directory: Path) -> tuple[str, str]:
    """Return what a rank says as it opens the model, or a slot in it."""
    spec = case.spec
    settings = BodySettings(
        model=str(directory),
        dtype="float32" if case.device == "cpu" else "bfloat16",
        device=case.device,
        args=spec.trainer.backend_args,
        quantize=spec.model.quantize,
        **{axis: getattr(spec.trainer, axis) for axis in ("tp", "pp", "cp", "ep")},
    )
    with pytest.raises(LoradError) as refused:
        if case.adapter is None:
            {"fsdp": open_fsdp, "megatron": open_megatron}[spec.trainer.backend](settings)
        else:
            body: Any = SimpleNamespace(setup=settings.backend_setup(spec.trainer.backend))
            slot = SlotSpec(case.adapter, lora_type=spec.lora.type, critic=spec.algorithm.has_critic)
            nobody: Any = None
            RankTrainer(body, nobody, "base").open(OpenSlot("run", slot))
    return words(refused.value)


@pytest.mark.parametrize("case", CASES)
def test_ranks_refuse_as_the_preflight_does(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: case.spec.trainer.ranks)
    directory = of_kind(case.model, case.kind, tmp_path)
    setup = backend_setup(case.spec, read_facts(directory), case.adapter, case.device)
    assert refused_before(setup) == refused_by_ranks(case, directory)


@pytest.mark.parametrize("spec", IN_POOLS)
async def test_pools_refuse_as_the_preflight_does(spec: dict[str, Any], tmp_path: Path) -> None:
    setup = backend_setup(convert(spec))
    names = {name: getattr(setup, name) for name in ("trainer", "engine", "mode", "quantize")}
    ranks = RanksSetup(dp=setup.dp) if setup.trainer == "fsdp" else None
    config = PoolSetup(pool="p", model="m", model_path=str(TINY), ranks=ranks, **names)
    nobody: Any = None
    with pytest.raises(SpecError) as refused:
        async with host._started(config, nobody, nobody, tmp_path, None):
            pass
    assert words(refused.value) == refused_before(setup)


@pytest.mark.parametrize(("engine", "adapter", "kind"), ON_SERVERS)
async def test_engines_refuse_as_the_preflight_does(
    engine: str, adapter: Adapter, kind: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"context_length": 64, "max_rank": 64, "slots": 2, "max_versions": 4}
    model = of_kind(TINY, kind, tmp_path)
    settings = ServerSettings(
        model=model, dtype="float32", device="cpu", targets=("q_proj",), memory_fraction=0.5, **sizes
    )
    fleet: Any = SimpleNamespace(is_attached=False, dialect=dialect_class(engine)())
    shapes = dict.fromkeys(adapter.config.modules, (4, 4))
    holdings = Holdings(fleet, settings, shapes, ServerTransport(tmp_path, "base"))
    with pytest.raises(AdapterRefused) as refused:
        await holdings.add("run@1", AdapterSource(adapter.digest(), adapter=adapter))
    assert words(refused.value) == refused_before(setup_of(engine, adapter, kind))
    holdings.close()


def setup_of(engine: str, adapter: Adapter, kind: str) -> BackendSetup:
    facts = read_facts(TINY)
    facts = dataclasses.replace(facts, model_type=kind or facts.model_type)
    return backend_setup(convert({"rollout": {"backend": engine}}), facts, adapter.config)


def setups() -> Iterator[BackendSetup]:
    for case in CASES:
        facts = read_facts(case.model)
        facts = dataclasses.replace(facts, model_type=case.kind or facts.model_type)
        yield backend_setup(case.spec, facts, case.adapter, case.device)
    yield from (backend_setup(convert(spec)) for spec in IN_POOLS)
    yield from (setup_of(*case) for case in ON_SERVERS)


def limits() -> Iterator[tuple[str, BackendLimit]]:
    """Every limit with the name of its backend, but what nobody starts the builtin trainer with."""
    for name, theirs in (*OF_TRAINERS.items(), *OF_ENGINES.items()):
        yield from ((name, limit) for limit in theirs if name or not limit.why.startswith(BUILTIN))


def test_every_limit_has_a_case() -> None:
    cases = list(setups())
    broken = {
        limit
        for name, limit in limits()
        if any(limit.breaks(setup) for setup in cases if name in ("", setup.trainer, setup.engine))
    }
    assert [limit.why for _, limit in limits() if limit not in broken] == []


@pytest.mark.parametrize(
    ("device", "experts", "is_refused"), [("cpu", 4, True), ("cpu", 0, False), ("cuda:0", 4, False)]
)
def test_mixtures_that_need_a_gpu_are_refused_without(device: str, experts: int, is_refused: bool) -> None:
    facts = dataclasses.replace(read_facts(TINY), model_type="granitemoehybrid", expert_count=experts)
    setup = BackendSetup(trainer="fsdp", engine="vllm", device=device, model=facts)
    if is_refused:
        assert refused_before(setup)[1] == "Set it to transformers."
    else:
        refuse(setup)


@pytest.mark.parametrize("is_partial", [True, False])
def test_sglang_takes_a_phi_that_is_rotated_whole(is_partial: bool) -> None:
    facts = dataclasses.replace(read_facts(TINY), model_type="phi3", rotates_in_part=is_partial)
    setup = BackendSetup(trainer="fsdp", engine="sglang", model=facts)
    if is_partial:
        assert "rotates whole heads" in refused_before(setup)[0]
    else:
        refuse(setup)
