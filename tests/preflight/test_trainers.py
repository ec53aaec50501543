"""Trainers that have ranks: everything about them is looked at before anything starts."""

import dataclasses
import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.peft import write_peft
from lorad.adapters.validate import expected_shapes
from lorad.backends import recipes
from lorad.backends.installed import FOR_GPUS, NEEDED, install_lines, installed_versions, older
from lorad.backends.setup import (
    adapter_config,
    backend_setup,
    max_rank,
    modules_of,
    needs_base,
    served_experts,
    targets_of,
)
from lorad.box.config import Backend, Config
from lorad.errors import SpecError
from lorad.limits.check import refuse
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.preflight.__main__ import preflight
from lorad.preflight.trainers import (
    check_adapted,
    check_bits,
    check_devices,
    check_names,
)
from lorad.protocol.preflight import SpecFacts
from lorad.servers.table import SERVERS
from lorad.spec.model import convert
from tests.kit.fakes.foreign_models import HIDDEN, make_gpt2, make_moe
from tests.kit.world import REPOSITORY

TINY = resolve("builtin:tiny")


@pytest.fixture
def install(tmp_path: Path, home: Path) -> Any:
    """`install(backend, **versions)`: an interpreter, named in config.yaml, that finds metadata of what it
    needs.
    """

    def install(backend: str, *, lacks: str = "", **versions: str) -> Path:
        site, python = tmp_path / f"{backend}-site", tmp_path / f"{backend}-python"
        for name in (*NEEDED[backend], *FOR_GPUS.get(backend, ())):
            if name != lacks:
                version = versions.get(name.replace("-", "_"), "99.0")
                about = site / f"{name.replace('-', '_')}-{version}.dist-info"
                about.mkdir(parents=True)
                (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        started = (
            f"import sys; sys.path[:] = [{str(site)!r}, *[p for p in sys.path if 'site-packages' not in p]]; "
        )
        code = (
            f'exec {sys.executable} -I -S -c "{started}code = sys.argv[3]; sys.argv[1:4] = []; '
            'exec(code)" "$@"'
        )
        python.write_text(f"#!/bin/sh\n{code}\n")
        python.chmod(0o755)
        (home / "config.yaml").write_text(json.dumps({"backends": {backend: {"python": str(python)}}}))
        return python

    return install


def check(cwd: Path, spec: dict[str, Any], **where: Any) -> SpecFacts:
    return preflight(convert(spec), cwd=cwd, **where)


def refusal(cwd: Path, spec: dict[str, Any], **where: Any) -> SpecError:
    with pytest.raises(SpecError) as refused:
        check(cwd, spec, **where)
    assert refused.value.hint
    return refused.value


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"trainer": {"tp": 2}}, "trainer.tp: the builtin trainer is one process"),
        ({"trainer": {"dp": 2}}, "trainer.dp: the builtin trainer is one process"),
        (
            {"trainer": {"backend_args": {"a": 1}}},
            "trainer.backend_args: the builtin trainer takes none, a would",
        ),
        (
            {"trainer": {"backend": "fsdp", "pp": 2}},
            "trainer.pp: fsdp cuts the base over all of its ranks",
        ),
        ({"trainer": {"backend": "fsdp", "ep": 2}}, "trainer.ep: fsdp"),
        (
            {"trainer": {"backend": "megatron", "tp": 3}},
            "lora.rank: 16 cannot be cut over the 3 tensor-parallel",
        ),
        ({"trainer": {"backend": "megatron", "tp": 2, "ep": 4}}, "trainer.ep: 4 does not divide the 2 ranks"),
        ({"trainer": {"backend": "fsdp"}, "pool": {"mode": "fused"}}, "pool.mode: fused is one process"),
        (
            {"trainer": {"backend": "fsdp"}, "pool": {"mode": "timesliced"}},
            "pool.mode: timesliced is for an engine that",
        ),
        ({"trainer": {"backend": "megatron"}}, "trainer.backend: config.yaml names no python for megatron"),
        (
            {"trainer": {"backend": "megatron", "cp": 2}},
            "trainer.cp: the megatron trainer cuts no sequence over ranks",
        ),
        ({"trainer": {"cp": 2}}, "trainer.cp: the builtin trainer is one process"),
        (
            {"trainer": {"backend": "fsdp", "backend_args": {"color": 1}}},
            "trainer.backend_args: fsdp has no color",
        ),
        (
            {"trainer": {"backend": "fsdp", "backend_args": {"attn_implementation": 1}}},
            "trainer.backend_args: attn_implementation is 1, no name",
        ),
        (
            {"trainer": {"backend": "megatron", "backend_args": {"bf16": True}}},
            "trainer.backend_args: bf16 is for lorad to set",
        ),
        (
            {"trainer": {"backend": "megatron", "backend_args": {"sequence_parallel": True}}},
            "trainer.backend_args: sequence_parallel is for lorad to set",
        ),
        (
            {"trainer": {"backend": "megatron", "pp": 2}, "algorithm": "ppo"},
            "trainer.pp: a critic reads the last hidden states",
        ),
        ({"resources": {"devices": 2}}, "resources.devices: 2, but this machine has no GPU"),
    ],
)
def test_what_the_trainer_does_not_have_is_refused(spec: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in str(refusal(tmp_path, spec))


def test_indivisible_rank_is_refused_with_fitting_ones(tmp_path: Path) -> None:
    said = refusal(tmp_path, {"lora": {"rank": 10}, "trainer": {"backend": "megatron", "tp": 4}})
    assert "8 or 12" in said.hint


@pytest.mark.parametrize(
    ("spec", "count", "says"),
    [
        ({"trainer": {"backend": "megatron", "tp": 2, "dp": 2}}, 4, None),
        (
            {"trainer": {"backend": "megatron", "tp": 2, "dp": 2}},
            2,
            "the run needs 4 GPUs, this machine has 2",
        ),
        (
            {"trainer": {"backend": "fsdp", "dp": 4}, "resources": {"devices": 2}},
            8,
            "is 4 but resources.devices is 2",
        ),
        (
            {"rollout": {"backend": "vllm", "tp": 2, "servers": 2}},
            2,
            "the run needs 4 GPUs, this machine has 2",
        ),
        ({"rollout": {"backend": "vllm", "servers": 2}, "resources": {"devices": 1}}, 1, None),
        (
            {"rollout": {"backend": "vllm", "tp": 2}, "resources": {"devices": 1}},
            2,
            "is 2 but resources.devices is 1",
        ),
        (
            {"rollout": {"backend": "vllm", "tp": 2}, "resources": {"devices": 1, "rollout_devices": 2}},
            3,
            None,
        ),
        (
            {"rollout": {"backend": "vllm", "servers": 2}, "pool": {"mode": "split"}},
            2,
            "the run needs 3 GPUs, this machine has 2",
        ),
    ],
)
def test_ranks_and_servers_need_enough_gpus(spec: dict[str, Any], count: int, says: str | None) -> None:
    if says is None:
        check_devices(convert(spec), "cuda:0", count)
        return
    with pytest.raises(SpecError, match=says):
        check_devices(convert(spec), "cuda:0", count)


@pytest.mark.parametrize(("slots", "what"), [(1, "no GPU"), (2, "2 slots of its CPU")])
def test_split_on_a_cpu_needs_slots(slots: int, what: str) -> None:
    spec = convert({"rollout": {"backend": "vllm", "servers": 2}, "pool": {"mode": "split"}})
    with pytest.raises(SpecError, match=f"2 devices for servers and one for the trainer.* has {what}"):
        check_devices(spec, "cpu", slots)
    check_devices(spec, "cpu", 3)


def test_on_the_cpu_ranks_are_processes(tmp_path: Path) -> None:
    check(tmp_path, {"trainer": {"backend": "fsdp", "dp": 2}})


def test_each_copy_of_the_base_needs_memory(install: Any, tmp_path: Path) -> None:
    install("megatron")
    base = read_facts(TINY).bytes("float32")
    wanted = {"fsdp": {"dp": 4}, "megatron": {"tp": 2, "dp": 3}}
    found = {
        name: check(tmp_path, {"trainer": {"backend": name, **sizes}}).memory_parts["bases"]
        for name, sizes in wanted.items()
    }
    assert found == {"fsdp": 2 * base, "megatron": 4 * base}


@pytest.mark.parametrize("lacks", ["megatron-core", "msgspec"])
def test_missing_package_is_refused_with_install_commands(install: Any, lacks: str, tmp_path: Path) -> None:
    install("megatron", lacks=lacks)
    said = refusal(tmp_path, {"trainer": {"backend": "megatron"}})
    assert f"megatron needs {lacks}" in str(said)
    assert all(line in said.hint for line in install_lines("megatron"))


def test_megatron_is_installed_otherwise_on_a_cpu() -> None:
    on_gpus, on_a_cpu = (install_lines("megatron", gpu=gpu) for gpu in (True, False))
    assert any(
        "--no-build-isolation megatron-bridge==0.6.2 megatron-core==0.19.2" in line for line in on_gpus
    )
    assert "PYTHONPATH" in on_a_cpu[-1] and "backends:" in on_gpus and "backends:" in on_a_cpu


def test_cpu_without_source_tree_is_offered_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "checkout", lambda: None)
    lines = " ".join(install_lines("megatron", gpu=False))
    assert "trainer.backend: fsdp" in lines and not any(word in lines for word in (".ci/", "tests/", "$PWD"))


def test_an_older_backend_is_warned_of(install: Any, tmp_path: Path) -> None:
    install("megatron", megatron_bridge="0.3.1")
    (warning,) = check(tmp_path, {"trainer": {"backend": "megatron"}}).warnings
    assert warning.startswith("trainer.backend: megatron-bridge is 0.3.1; lorad was tried with 0.6.2")


def test_fsdp_runs_in_lorads_own_environment(tmp_path: Path) -> None:
    assert older("fsdp", installed_versions("fsdp", Path(sys.executable))) == []


@pytest.mark.parametrize(
    ("trainer", "rollout", "needs"),
    [
        ("builtin", "builtin", True),
        ("fsdp", "builtin", True),
        ("builtin", "vllm", True),
        ("fsdp", "vllm", False),
    ],
)
def test_pool_loads_a_base_only_when_needed(trainer: str, rollout: str, needs: bool) -> None:
    assert needs_base(convert({"trainer": {"backend": trainer}, "rollout": {"backend": rollout}})) is needs


def test_unknown_architecture_needs_backends_that_know_it(tmp_path: Path) -> None:
    make_moe(tmp_path / "moe")
    model = {"model": {"path": "moe"}}
    hints = {"builtin": "trainer.backend: megatron or fsdp, and rollout", "fsdp": "set rollout.backend to"}
    for trainer, hint in hints.items():
        refused = refusal(tmp_path, model | {"trainer": {"backend": trainer}})
        assert "does not know the architecture MixMoeForCausalLM" in str(refused)
        assert hint in refused.hint


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    make_moe(tmp_path)
    facts = read_facts(tmp_path)
    (warning,) = check_adapted(convert({}), facts, facts.linears)
    assert "linears of the experts get no adapters" in warning
    for named in ("*.experts.0.up_proj", "gate_up_proj"):
        with pytest.raises(
            SpecError, match=r"experts get no adapters.*model\.layers\.\*\.mlp\.experts"
        ) as refused:
            check_adapted(convert({"lora": {"target_modules": named}}), facts, facts.linears)
        assert "q_proj" in refused.value.hint and "exclude_modules" not in refused.value.hint
    tiny = read_facts(TINY)
    assert check_adapted(convert({}), tiny, tiny.linears) == []


@pytest.mark.parametrize("rollout", ["builtin", "sglang", "vllm"])
def test_experts_are_adapted_where_both_ends_can(rollout: str) -> None:
    facts = read_facts(resolve("builtin:tiny-moe"))
    spec = convert({"rollout": {"backend": rollout}})
    both = modules_of(spec, facts)
    assert len(both) == 48 and len([name for name in both if ".experts." in name]) == 36
    shapes = targets_of("builtin", facts.linears, served_experts(rollout, facts))
    assert check_adapted(spec, facts, shapes) == []
    megatron = convert({"rollout": {"backend": rollout}, "trainer": {"backend": "megatron"}})
    assert modules_of(megatron, facts) == both
    (warning,) = check_adapted(megatron, facts, targets_of("megatron", facts.linears))
    assert "the 36 linears of the experts get no adapters" in warning


@pytest.mark.parametrize(
    ("more", "device", "says"),
    [
        ({}, "cuda", "trainer.backend_args: on a GPU Megatron computes all experts in one grouped product"),
        ({"trainer": {"backend_args": {"moe_grouped_gemm": False}}}, "cuda", None),
        ({"model": {"dtype": "float32"}}, "cuda", None),
        ({"lora": {"exclude_modules": ["*.experts.*"]}}, "cuda", None),
        (
            {"lora": {"dropout": 0.1}, "trainer": {"tp": 2, "ep": 2}},
            "cpu",
            "lora.dropout: 0.1 on experts would differ",
        ),
        ({"lora": {"dropout": 0.1}, "trainer": {"dp": 2, "ep": 2}}, "cpu", None),
        (
            {"lora": {"type": "lora", "target_modules": "*.experts.*.up_proj"}},
            "cpu",
            "lora.target_modules: model.layers.0.mlp.experts.0.up_proj: with lora.type: lora",
        ),
    ],
)
def test_experts_that_megatron_cannot_train_are_refused(
    more: dict[str, Any], device: str, says: str | None
) -> None:
    more = {**more, "trainer": {"backend": "megatron", **more.get("trainer", {})}}
    spec, facts = convert(more), read_facts(resolve("builtin:tiny-moe"))
    facts = dataclasses.replace(facts, dtype="bfloat16")
    adapter = AdapterConfig(8, 16.0, modules_of(spec, facts), dropout=spec.lora.dropout)
    if says is None:
        refuse(backend_setup(spec, facts, adapter, device))
        return
    with pytest.raises(SpecError) as refused:
        refuse(backend_setup(spec, facts, adapter, device))
    assert str(refused.value).startswith(says) and refused.value.hint


@pytest.mark.parametrize(
    ("more", "model", "says"),
    [
        ({}, "tiny", None),
        ({"trainer": {"backend": "fsdp"}}, "tiny", None),
        ({}, "tiny-moe", None),
        ({"trainer": {"backend": "megatron"}}, "tiny", "lora.dora: the megatron trainer has no place"),
        ({"rollout": {"backend": "vllm"}}, "tiny", "lora.dora: vllm has no place"),
        ({"rollout": {"backend": "sglang"}}, "tiny", "lora.dora: sglang has no place"),
        (
            {"lora": {"target_modules": "*.experts.*"}},
            "tiny-moe",
            "lora.dora: DoRA is not computed on experts",
        ),
        ({"lora": {"dropout": 0.1}}, "tiny", "lora.dropout: 0.1 with lora.dora"),
    ],
)
def test_dora_is_refused_where_nobody_computes_it(more: dict[str, Any], model: str, says: str | None) -> None:
    lora = {"target_modules": "q_proj", **more.get("lora", {}), "dora": True}
    spec, facts = convert({**more, "lora": lora}), read_facts(resolve(f"builtin:{model}"))
    if says is None:
        refuse(backend_setup(spec, facts, adapter_config(spec, facts)))
        return
    with pytest.raises(SpecError) as refused:
        refuse(backend_setup(spec, facts, adapter_config(spec, facts)))
    assert str(refused.value).startswith(says) and "leave lora.dora out" in refused.value.hint


@pytest.mark.parametrize("backend", ["fsdp", "megatron", "builtin"])
def test_families_whose_experts_a_trainer_lacks_are_refused(backend: str) -> None:
    facts = dataclasses.replace(read_facts(resolve("builtin:tiny-moe")), model_type="gpt_oss")
    every, few = (
        convert({"trainer": {"backend": backend}, "lora": lora})
        for lora in ({}, {"exclude_modules": ["*.experts.*"]})
    )
    refuse(backend_setup(few, facts, AdapterConfig(8, 16.0, modules_of(few, facts))))
    adapter = AdapterConfig(8, 16.0, modules_of(every, facts))
    if backend == "builtin":
        refuse(backend_setup(every, facts, adapter))
        return
    with pytest.raises(SpecError, match=f"the {backend} trainer adapts no experts of gpt_oss"):
        refuse(backend_setup(every, facts, adapter))


def ranks_of(lora: dict[str, Any], **more: Any) -> tuple[int, int]:
    """The rank of an adapter of the mixture, and its rank on experts."""
    made = adapter_config(convert({"lora": lora, **more}), read_facts(resolve("builtin:tiny-moe")))
    return made.rank, made.rank_of_experts


def test_rank_of_experts_follows_those_a_token_meets() -> None:
    assert ranks_of({"rank": 16}) == (16, 8) and ranks_of({"rank": 1}) == (1, 1)
    assert ranks_of({"rank": 16, "experts": {"rank": 32}}) == (16, 32)
    assert ranks_of({"rank": 16, "target_modules": "q_proj"}) == (16, 16)
    assert adapter_config(convert({}), read_facts(TINY)).expert_rank is None


@pytest.mark.parametrize(
    ("lora", "key", "says"),
    [
        ({"experts": {"rank": 4}, "target_modules": "q_proj"}, "lora.experts.rank", "no expert is adapted"),
        ({"experts": {"rank": 0}}, "lora.experts.rank", "Expected int >= 1"),
        ({"experts": {"layout": "per_expert"}}, "lora.experts.layout", "unknown key"),
        ({"router": "frozen"}, "lora.router", "unknown key"),
    ],
)
def test_settings_of_experts_are_refused_by_key(lora: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        ranks_of(lora)
    assert refused.value.key == key and refused.value.hint


def test_servers_for_clients_take_other_ranks() -> None:
    """A model of rank 32 shares the servers that the same client's model of rank 8 was the first on."""
    first, second = (max_rank(convert({"algorithm": "tinker", "lora": {"rank": rank}})) for rank in (8, 32))
    assert first == second == 32
    assert max_rank(convert({"algorithm": "tinker", "lora": {"rank": 100}})) == 128


def test_servers_are_started_for_the_highest_rank() -> None:
    assert max_rank(convert({"lora": {"rank": 8}})) == 16
    assert max_rank(convert({"lora": {"rank": 8, "experts": {"rank": 40}}})) == 64
    with pytest.raises(SpecError) as refused:
        max_rank(convert({"lora": {"experts": {"rank": 600}}}))
    assert refused.value.key == "lora.experts.rank"


def test_servers_take_no_experts_of_other_models(tmp_path: Path) -> None:
    make_moe(tmp_path)
    facts = read_facts(tmp_path)
    assert facts.experts and all(served_experts(kind, facts) == {} for kind in (*SERVERS, "mine"))


def test_names_shared_with_experts_need_excludes(tmp_path: Path) -> None:
    """`gate_proj,up_proj,down_proj` would adapt the shared experts alone."""
    make_moe(tmp_path / "moe")
    fsdp = {"backend": "fsdp"}, {"backend": "vllm", "url": "http://localhost:1"}
    spec = {
        "model": {"path": "moe"},
        "trainer": fsdp[0],
        "rollout": fsdp[1],
        "lora": {"target_modules": "up_proj"},
    }
    refused = refusal(tmp_path, spec)
    assert "cannot adapt: model.layers.*.mlp.experts.*.up_proj" in str(refused)
    excluded = json.loads(refused.hint[refused.hint.index("[") : refused.hint.index("]") + 1])
    assert excluded == ["lm_head", "model.layers.*.mlp.experts.*.up_proj"]
    spec["lora"]["exclude_modules"] = excluded
    facts = read_facts(tmp_path / "moe")
    assert check_adapted(convert(spec), facts, facts.linears)
    assert {name.rpartition(".mlp.")[2] for name in modules_of(convert(spec), facts)} == {
        "shared_expert.up_proj"
    }


def test_megatron_refuses_linears_it_cannot_adapt(install: Any, tmp_path: Path) -> None:
    install("megatron")
    more = {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (4, HIDDEN)}
    make_moe(tmp_path / "moe", more=more)
    spec = {"model": {"path": "moe"}, "trainer": {"backend": "megatron"}}
    spec["rollout"] = {"backend": "vllm", "url": "http://localhost:1"}
    refused = refusal(tmp_path, spec)
    assert "'all-linear' names 3 linears that the megatron trainer cannot adapt: " in str(refused)
    assert "model.layers.*.mlp.shared_expert.up_proj, model.layers.*.self_attn.kv_a_proj_with_mqa" in str(
        refused
    )
    assert "fsdp" in refused.hint
    assert "no vllm server answers" in str(
        refusal(tmp_path, {**spec, "lora": {"target_modules": "linear_qkv"}})
    )


def test_megatron_adapts_what_it_has_a_name_for(tmp_path: Path) -> None:
    make_moe(tmp_path)
    linears = read_facts(tmp_path).linears
    assert "model.layers.0.mlp.shared_expert.up_proj" in targets_of("fsdp", linears)
    assert {name.rpartition(".")[2] for name in targets_of("megatron", linears)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "lm_head",
    }  # fmt: skip


@pytest.mark.parametrize("has_biases", [False, True])
def test_megatron_is_asked_about_models_without_a_test(
    has_biases: bool, install: Any, tmp_path: Path
) -> None:
    python = install("megatron")
    facts, spec = read_facts(TINY), convert({"trainer": {"backend": "megatron"}})
    shutil.copytree(TINY, tmp_path / "base")
    config = json.loads((TINY / "config.json").read_text()) | {"attention_bias": has_biases}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    box = Config(backends={"megatron": Backend(python=python)})
    told = check_names(spec, facts, adapter_config(spec, facts), tmp_path / "base", box, "cpu")
    assert [text[:61] for text in told] == [
        "trainer.backend: megatron could not be asked whether it loads"
    ] * has_biases


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"tp": 4}, "trainer.tp: 4 ranks cannot share HEADS key-value heads"),
        ({"pp": 2}, "trainer.pp: 2 stages cannot share LAYERS layers evenly"),
        ({"ep": 2, "dp": 2}, "trainer.ep: 2 ranks for experts, but the model has none"),
        ({"pp": 2, "backend_args": {"num_layers_in_first_pipeline_stage": 1}}, None),
        ({"tp": 2, "pp": 3}, None),
    ],
)
def test_sizes_that_megatron_cannot_cut_are_refused(
    trainer: dict[str, Any], says: str | None, install: Any, tmp_path: Path
) -> None:
    install("megatron")
    facts, spec = read_facts(TINY), {"trainer": {"backend": "megatron", **trainer}}
    if says is None:
        check(tmp_path, spec)
        return
    assert says.replace("HEADS", str(facts.kv_heads)).replace("LAYERS", str(facts.layers)) in str(
        refusal(tmp_path, spec)
    )


def test_experts_are_shared_evenly(tmp_path: Path) -> None:
    make_moe(tmp_path)
    facts = read_facts(tmp_path)
    refuse(backend_setup(convert({"trainer": {"backend": "megatron", "dp": 2, "ep": 2}}), facts))
    with pytest.raises(SpecError, match=r"trainer\.ep: 3 ranks cannot share 4 experts"):
        refuse(backend_setup(convert({"trainer": {"backend": "megatron", "dp": 3, "ep": 3}}), facts))


@pytest.mark.parametrize("targets", ["q_proj", "linear_qkv, gate_proj", "*.layers.0.*.q_proj"])
def test_half_of_what_megatron_fuses_shares_no_a(targets: str, install: Any, tmp_path: Path) -> None:
    install("megatron")
    spec = {"lora": {"target_modules": targets, "type": "lora"}, "trainer": {"backend": "megatron"}}
    said = refusal(tmp_path, spec)
    assert "with lora.type: lora" in str(said) and "canonical_lora" in said.hint
    check(tmp_path, spec | {"lora": {"target_modules": targets}})
    check(tmp_path, spec | {"lora": {"target_modules": "linear_qkv, linear_fc1", "type": "lora"}})


@pytest.mark.parametrize("shared", [True, False])
def test_fused_lora_needs_equal_a(shared: bool, install: Any, tmp_path: Path) -> None:
    install("megatron")
    shapes = {
        name: shape
        for name, shape in read_facts(TINY).linears.items()
        if name.endswith(("gate_proj", "up_proj"))
    }
    config = AdapterConfig(2, 4.0, tuple(sorted(shapes)))
    tensors = {name: np.ones(shape, np.float32) for name, shape in expected_shapes(config, shapes).items()}
    if not shared:
        tensors["model.layers.0.mlp.up_proj.lora_A.weight"][0, 0] = 2
    (tmp_path / "start").mkdir()
    write_peft(Adapter(config, tensors), tmp_path / "start", "tiny")
    lora = {"rank": 2, "alpha": 4, "target_modules": "linear_fc1", "adapter_path": "start"}
    spec = {"lora": lora | {"type": "lora"}, "trainer": {"backend": "megatron"}}
    check(tmp_path, spec | {"lora": lora})
    if shared:
        check(tmp_path, spec)
        return
    assert "lora.adapter_path: lora.type: lora shares A over" in str(refusal(tmp_path, spec))


def test_on_gpus_megatron_needs_transformer_engine_too(install: Any) -> None:
    python = install("megatron", lacks="transformer-engine")
    assert "transformer-engine" not in installed_versions("megatron", python)
    with pytest.raises(SpecError, match="megatron needs transformer-engine"):
        installed_versions("megatron", python, gpu=True)


@pytest.mark.parametrize("others", [{}, {"lm_head": (128, 4)}])
def test_megatron_refuses_a_model_without_known_linears(others: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(
        SpecError, match=r"megatron can adapt no linear of the model's layers \(it has bert\.query\)"
    ) as refused:
        targets_of("megatron", {"bert.query": (4, 4)} | others)
    assert "fsdp" in refused.value.hint


def test_transposed_weights_are_no_linears(tmp_path: Path) -> None:
    make_gpt2(tmp_path)
    spec = {"model": {"path": str(tmp_path)}, "trainer": {"backend": "fsdp"}, "rollout": {"backend": "vllm"}}
    said = refusal(tmp_path, spec)
    assert (
        "GPT2LMHeadModel has no linear that an adapter could be put on" in str(said) and "Conv1D" in said.hint
    )


def test_oldest_torch_has_grouped_products() -> None:
    """`F.grouped_mm`, by which experts are computed on a GPU, is there from 2.10 on."""
    lines = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "torch>=2.10" in lines and "torch>=2.10" in " ".join(install_lines("fsdp"))


@pytest.mark.parametrize(
    ("backends", "device", "warns"),
    [
        (("builtin", "builtin"), "cuda:0", False),
        (("fsdp", "sglang"), "cuda:0", True),
        (("builtin", "vllm"), "cuda:0", True),
        (("fsdp", "sglang"), "cpu", False),
    ],
)
def test_bits_that_gpus_cannot_keep_are_warned_of(
    backends: tuple[str, str], device: str, *, warns: bool
) -> None:
    trainer, engine = ({"backend": name} for name in backends)
    spec = {"trainer": trainer, "rollout": engine}
    found = [check_bits(convert(spec | {"deterministic": wanted}), device) for wanted in (True, False, None)]
    assert found[1:] == [[], []] and bool(found[0]) is warns
    assert not warns or all(name in found[0][0] for name in {*backends} - {"builtin"})
