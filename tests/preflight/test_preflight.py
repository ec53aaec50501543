"""What a spec names is looked at before anything starts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.peft import write_peft
from lorad.adapters.targets import match_modules
from lorad.adapters.validate import expected_shapes
from lorad.daemon.runs.preflight import answer
from lorad.errors import SpecError
from lorad.models.directory import linear_shapes, read_config, resolve
from lorad.preflight.__main__ import preflight
from lorad.protocol.preflight import ErrorFacts, PreflightLine, SpecFacts
from lorad.spec.lora import Lora
from lorad.spec.model import convert
from lorad.spec.text import load_spec, places
from lorad.text import size

ROOT = Path(__file__).parents[2]
TINY = resolve("builtin:tiny")
SHAPES = linear_shapes(read_config(TINY))


def check(cwd: Path, spec: dict[str, Any] | None = None, **arguments: Any) -> SpecFacts:
    return preflight(convert(spec or {}), cwd=cwd, **arguments)


def refusal(cwd: Path, spec: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(SpecError) as refused:
        check(cwd, spec, **arguments)
    assert refused.value.hint
    return str(refused.value)


def an_adapter(
    directory: Path, rank: int = 16, alpha: float = 32, modules: str = "all-linear", **more: Any
) -> None:
    directory.mkdir()
    config = AdapterConfig(rank, alpha, match_modules(SHAPES, modules), **more)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in expected_shapes(config, SHAPES).items()}
    write_peft(Adapter(config, tensors), directory, "tiny")


def test_the_default_spec_is_fit_to_run(tmp_path: Path) -> None:
    facts = check(tmp_path)
    config = read_config(TINY)
    assert (facts.model_path, facts.parameters) == (str(TINY), config.num_parameters)
    assert len(facts.modules) == 7 * config.num_hidden_layers
    assert facts.adapter_parameters == 16 * sum(sum(SHAPES[module]) for module in facts.modules)
    assert (facts.dataset_size, facts.dropped, facts.eval_size, facts.warnings) == (None, 0, 256, [])
    assert facts.memory_needed > 4 * facts.parameters


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"model": {"path": "builtin:huge"}}, "model.path: no builtin model"),
        ({"model": {"path": "nowhere"}}, "model.path: nowhere is not a directory"),
        ({"lora": {"target_modules": "q_prj"}}, "lora.target_modules: 'q_prj'"),
        ({"lora": {"adapter_path": "nowhere"}}, "lora.adapter_path: "),
        ({"trainer": {"backend": "megatrn"}}, "trainer.backend: no backend 'megatrn'"),
        ({"rollout": {"backend": "trt"}}, "rollout.backend: no backend 'trt'"),
        (
            {"data": {"max_prompt_tokens": 500}, "rollout": {"max_new_tokens": 2000}},
            "is 2500 tokens, the model has 2048",
        ),
        ({"data": {"train": "nowhere.jsonl"}}, "there is no file"),
        ({"data": {"train": "sort", "max_prompt_tokens": 5}}, "data.max_prompt_tokens: 'S:"),
        ({"data": {"train": "sort", "eval": "nowhere.parquet"}}, "there is no file"),
        ({"reward": "exact"}, "reward: there is no builtin 'exact'"),
        ({"reward": {"name": "regex", "pattern": "("}}, "reward.pattern: '(' does not compile"),
        ({"reward": "nowhere.py:f"}, "reward: there is no file"),
    ],
)
def test_missing_or_unfit_things_are_refused(spec: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refusal(tmp_path, spec)


def test_a_backend_may_be_configured(tmp_path: Path, home: Path) -> None:
    (home / "config.yaml").write_text("backends: {mine: {trainer: 'm:C', engine: 'm:D'}}")
    check(tmp_path, {"trainer": {"backend": "mine"}, "rollout": {"backend": "mine"}})


def test_prompts_fit_the_positions_of_the_model(tmp_path: Path) -> None:
    short = shutil.copytree(resolve("builtin:tiny"), tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    rows = [json.dumps({"prompt": "1" * length, "answer": "1"}) + "\n" for length in (40, 55)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    spec: dict[str, Any] = {
        "model": {"path": "short"},
        "data": {"train": "rows.jsonl", "chat_template": "never"},
    }
    assert check(tmp_path, spec).dropped == 1  # of 64 positions, 16 are for the completion
    with pytest.raises(SpecError, match=r"rollout\.max_new_tokens: 64 leaves no room for a prompt"):
        check(tmp_path, spec | {"rollout": {"max_new_tokens": 64}})


def test_relative_paths_start_where_the_spec_is(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    assert check(tmp_path, {"model": {"path": "./model"}}).model_path == str(tmp_path / "model")


def test_a_fitting_adapter_to_start_from_is_accepted(tmp_path: Path) -> None:
    an_adapter(tmp_path / "a")
    check(tmp_path, {"lora": {"adapter_path": "a"}})


def from_adapter(cwd: Path, *overrides: str, text: str = "lora: {adapter_path: a}") -> SpecFacts:
    """Check a spec as `lorad run` does, which knows what of it was written, and where."""
    spec = load_spec(text, source="spec.yaml", overrides=overrides)
    return preflight(spec, cwd=cwd, written=places("lora", text, "spec.yaml", overrides))


def test_what_is_left_out_comes_from_the_adapter(tmp_path: Path) -> None:
    an_adapter(tmp_path / "a", 4, 12, "q_proj,v_proj", rslora=True, dropout=0.05)
    facts = from_adapter(tmp_path)
    expected = Lora(4, 12.0, 0.05, ["q_proj", "v_proj"], [], rslora=True, adapter_path="a")
    assert facts.lora == expected and len(facts.modules) == 6
    assert facts.adapter_parameters == 4 * sum(sum(SHAPES[module]) for module in facts.modules)


def test_what_is_written_and_equal_stays(tmp_path: Path) -> None:
    an_adapter(tmp_path / "a", rank=4, modules="q_proj,k_proj,v_proj", dropout=0.05)
    facts = from_adapter(tmp_path, "lora.target_modules=linear_qkv", "lora.rank=4", "lora.dropout=0")
    assert facts.lora == Lora(4, 32.0, 0.0, "linear_qkv", adapter_path="a")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("lora.rank=16", "override lora.rank=16: lora.rank: 16 here but 4 in a/adapter_config.json (r)"),
        ("lora={adapter_path: a, alpha: 64}", "lora.alpha: 64 here but 32 in a/adapter_config.json"),
        ("lora.rslora=true", "lora.rslora: true here but false in a/adapter_config.json (use_rslora)"),
        ("lora.dora=true", "lora.dora: true here but false in a/adapter_config.json (use_dora)"),
        (
            "lora.target_modules=all-linear",
            "with all-linear there are 21 modules, 18 others than the 3 in a/adapter_config.json "
            "(target_modules): the adapter lacks model.layers.0.mlp.down_proj",
        ),
        ("lora.exclude_modules=q_proj", "lora.exclude_modules: "),
    ],
)
def test_what_is_written_and_contradicts_is_refused(override: str, says: str, tmp_path: Path) -> None:
    an_adapter(tmp_path / "a", rank=4, modules="q_proj" if "exclude" not in override else "q_proj,v_proj")
    with pytest.raises(SpecError, match=re.escape(says)) as refused:
        from_adapter(tmp_path, override)
    assert refused.value.hint.startswith("Leave lora.") and not refused.value.others


def test_all_contradictions_are_told_with_lines(tmp_path: Path) -> None:
    an_adapter(tmp_path / "a", rank=4, modules="q_proj")
    with pytest.raises(SpecError, match=r"spec\.yaml:3: lora\.rank: 8 here but 4") as refused:
        from_adapter(
            tmp_path, "lora.target_modules=w1", text="lora:\n  adapter_path: a\n  rank: 8\n  alpha: 1\n"
        )
    others = [str(other).partition(": lora.")[::2] for other in refused.value.others]
    assert [(where, key.partition(":")[0]) for where, key in others] == [
        ("spec.yaml:4", "alpha"),
        ("override lora.target_modules=w1", "target_modules"),
    ]


def test_errors_about_open_values_name_the_adapter(tmp_path: Path) -> None:
    an_adapter(tmp_path / "a", rank=6)
    spec = "lora: {adapter_path: a}\ntrainer: {backend: megatron, tp: 4}\nrollout: {backend: vllm}"
    with pytest.raises(SpecError, match=r"a/adapter_config\.json: lora\.rank: 6 cannot be cut over the 4"):
        from_adapter(tmp_path, text=spec)


def test_a_fork_may_not_contradict_its_weights(tmp_path: Path) -> None:
    an_adapter(tmp_path / "a", rank=4)
    assert "lora.rank: 16 here but 4 in a" in refusal(tmp_path, {"lora": {"adapter_path": "a"}})


def test_refusal_for_memory_has_numbers(tmp_path: Path) -> None:
    said = refusal(tmp_path, {}, available=3 << 20)
    assert "MiB on cpu, 3.0 MiB are free" in said and "processes 315.0 MiB, bases 2.3 MiB" in said
    check(tmp_path, {"lora": {"rank": 1}}, available=3 << 20, warm=True)
    assert check(tmp_path, {}, device="cuda:0").memory_available is None


def test_sizes_are_told_in_their_units() -> None:
    assert (size(3 << 29), size(5 << 20)) == ("1.5 GiB", "5.0 MiB")


def test_data_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"S:{'1' * n}=", "answer": "1"} for n in (1, 2, 30)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    facts = check(tmp_path, {"data": {"train": "a.jsonl", "eval": "a.jsonl", "max_prompt_tokens": 8}})
    assert (facts.dataset_size, facts.dropped, facts.eval_size) == (2, 1, 2)
    assert len(facts.warnings) == 3


@pytest.mark.system
def test_reward_needing_absent_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "S:1=", "level": 1}')
    (tmp_path / "r.py").write_text("def f(completion, level): return 1\ndef g(answer, depth): return 1\n")
    spec: dict[str, Any] = {"data": {"train": "a.jsonl"}}
    check(tmp_path, {**spec, "reward": "r.py:f"})
    assert "r.py:g needs answer, depth" in refusal(tmp_path, {**spec, "reward": "r.py:g"})
    assert "exact_match needs answer" in refusal(tmp_path, spec)
    assert "has no function h" in refusal(tmp_path, {**spec, "reward": "r.py:h"})


def test_what_only_trl_gives_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(completions, log_metric): return [1.0 for c in completions]")
    with pytest.raises(SpecError, match="needs log_metric") as refused:
        check(tmp_path, {"reward": "r.py:f"})
    assert "Only TRL's trainer gives log_metric" in refused.value.hint


def test_parameters_of_verl_are_named_as_here(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(data_source, solution_str, ground_truth): return 1.0")
    with pytest.raises(SpecError, match="needs data_source, ground_truth, solution_str") as refused:
        check(tmp_path, {"reward": "r.py:f"})
    renamed = "verl's solution_str is completion here and ground_truth is answer here"
    assert refused.value.hint.startswith(renamed)


FUNCTIONS = """
def twice(logprobs): return logprobs.sum(), 2 + 0 * logprobs
def short(rewards): return rewards[1:]
def odd(logprobs, target): return 0.0, logprobs
def pulled(logprobs, ref): return ((logprobs - ref) ** 2).sum(), 2 * (logprobs - ref)
def good(rewards): return rewards
"""


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"loss": "nowhere.py:f"}, "algorithm.loss: there is no file"),
        ({"advantage": "std"}, "algorithm.advantage: there is no file"),
        ({"loss": "f.py:none"}, "algorithm.loss: "),
        ({"loss": "f.py:twice"}, "is 2, but finite differences of the value give 1"),
        ({"loss": "f.py:odd"}, "odd of "),
        ({"loss": "f.py:pulled"}, "f.py:5: TypeError"),
        ({"advantage": "f.py:short"}, "algorithm.advantage: short of "),
        ({"advantage": "f.py:good", "user_code": {"env": ["NO_KEY"]}}, "algorithm.user_code.env: NO_KEY"),
    ],
)
def test_a_wrong_function_is_refused_by_key(algorithm: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS)
    assert says in refusal(tmp_path, {"algorithm": algorithm})


def test_functions_that_fit_are_let_through(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS)
    algorithm = {"loss": "f.py:pulled", "advantage": "f.py:good", "kl": {"reference": "base"}}
    assert check(tmp_path, {"algorithm": algorithm}).warnings == []


@pytest.mark.parametrize(
    ("lora", "says"),
    [({"init": "zero"}, "never learn"), ({"target_modules": "linear_qkv"}, "attention alone")],
)
def test_what_is_probably_not_meant_is_warned_of(lora: dict[str, Any], says: str, tmp_path: Path) -> None:
    (warning,) = check(tmp_path, {"lora": lora}).warnings
    assert says in warning


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"trainer": {"warmup_steps": 61}}, "trainer.warmup_steps: 61 is more than the 60 steps"),
        ({"trainer": {"schedule": "cosine", "schedule_steps": 9}}, "made at trainer.min_lr 0"),
        ({"algorithm": {"kl": {"coef": 0.1, "type": "k1"}}}, "k1 has no gradient in the mean"),
        ({"algorithm": {"kl": {"reference": "base"}}}, "no effect while algorithm.kl.coef is 0"),
        ({"algorithm": {"minibatches": 17}}, "17 is more than the 16 of data.prompts_per_step"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p: samples come from a truncated distribution"),
        ({"rollout": {"top_k": 8, "top_p": 0.9}}, "rollout.top_p and rollout.top_k: samples"),
    ],
)
def test_settings_without_their_effect_are_warned_of(spec: dict[str, Any], says: str, tmp_path: Path) -> None:
    (warning,) = check(tmp_path, spec).warnings
    assert says in warning


def test_rate_below_its_minimum_is_refused(tmp_path: Path) -> None:
    trainer = {"lr": 1e-4, "min_lr": 1e-3, "schedule": "cosine"}
    assert "trainer.min_lr: 0.001 is more than trainer.lr 0.0001" in refusal(tmp_path, {"trainer": trainer})


def test_a_reference_fits_the_base_and_is_counted(tmp_path: Path) -> None:
    an_adapter(tmp_path / "a", rank=4)
    with_it, without = check(tmp_path, reference=tmp_path / "a"), check(tmp_path)
    assert with_it.reference_parameters == with_it.adapter_parameters // 4
    assert with_it.memory_needed - without.memory_needed == 4 * with_it.reference_parameters
    config = AdapterConfig(4, 8, ("model.layers.0.self_attn.q_proj",))
    shapes = dict.fromkeys(expected_shapes(config, SHAPES), (3, 4))
    (tmp_path / "b").mkdir()
    tensors = {name: np.zeros((4, 3) if "lora_A" in name else (3, 4), np.float32) for name in shapes}
    write_peft(Adapter(config, tensors), tmp_path / "b", "other")
    assert "algorithm.kl.reference: " in refusal(tmp_path, {}, reference=tmp_path / "b")


def test_a_critic_is_counted_in_memory(tmp_path: Path) -> None:
    plain = check(tmp_path)
    whole, half = (
        check(tmp_path, {"algorithm": {"name": "ppo", "critic": {"rank": rank}}}) for rank in (None, 8)
    )
    assert whole.critic_parameters == plain.adapter_parameters == 2 * half.critic_parameters
    assert whole.memory_needed - plain.memory_needed == 16 * whole.critic_parameters


def run_module(question: str) -> PreflightLine:
    done = subprocess.run(
        [sys.executable, "-m", "lorad.preflight"],
        input=question,
        text=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=PreflightLine)  # behind what it was doing


def test_the_module_answers_in_json(tmp_path: Path) -> None:
    good = run_module(json.dumps({"spec": {"name": "x"}, "cwd": str(tmp_path)}))
    assert good.facts is not None and good.facts.model_path == str(TINY)
    bad = run_module(json.dumps({"spec": {"lora": {"rank": 0}}, "cwd": str(tmp_path)}))
    said = ErrorFacts(
        "SpecError",
        "lora.rank: Expected int >= 1",
        "The default is 16.",
        key="lora.rank",
        problem="Expected int >= 1",
    )
    assert bad == PreflightLine(error=said)
    assert run_module("{").error is not None


def test_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve("builtin:tiny"), model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SpecError, match=r"model\.safetensors is damaged"):
        check(tmp_path, {"model": {"path": str(model)}})


LIES = """
import atexit, os, subprocess
LIE = b'{"facts": {"model_path": 3, "parameters": "many"}}'
subprocess.run(["echo", LIE.decode()])
os.write(1, b"\\n" + LIE + b"\\n")
atexit.register(os.write, 1, b"\\n" + LIE + b"\\n")

def score(**_):
    return 0.0
"""


def test_a_reward_module_cannot_answer_for_the_check(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(LIES)
    question = json.dumps({"spec": {"reward": {"name": "rewards.py:score"}}, "cwd": str(tmp_path)})
    command = [sys.executable, "-m", "lorad.preflight"]
    done = subprocess.run(command, input=question.encode(), capture_output=True, cwd=ROOT)
    assert answer(done.stdout, done.stderr).model_path == str(TINY) and b'"many"' not in done.stdout


@pytest.mark.parametrize(
    "facts",
    [
        *({"model_path": 3}, {"parameters": "many"}, {"parameters": -1}, [1], {"warnings": 7}),
        {"model_path": "/" + "a" * 5000},
        {"warnings": ["w"] * 1000},
        {"modules": ["m"] * 200_000},
        {"memory_parts": dict.fromkeys(map(str, range(1000)), 1)},
        {"look": {"prompts": {"least": 1, "median": 1, "most": 1}, "prompt": "p" * (5 << 20)}},
    ],
    ids=lambda facts: str(facts)[:20],
)
def test_facts_of_wrong_types_or_sizes_are_refused(facts: Any) -> None:
    with pytest.raises(SpecError, match="fell over: its answer"):
        answer(json.dumps({"facts": facts}).encode(), b"")


def test_facts_of_a_killed_check_are_nobodys() -> None:
    told = json.dumps({"facts": {"model_path": str(TINY)}}).encode() + b"\n"
    assert answer(told, b"", 0).model_path == str(TINY)
    with pytest.raises(SpecError, match="was killed"):
        answer(told, b"", 128 + signal.SIGKILL)


@pytest.mark.system
def test_a_look_measures_all_rows(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "1" * length, "answer": "1"}) + "\n" for length in (3, 5, 9, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    data = {"train": "rows.jsonl", "max_prompt_tokens": 6, "shuffle": False}
    left_out = check(tmp_path, {"data": data}, look=True)
    assert left_out.look is not None and (left_out.dropped, left_out.look.cut) == (2, 0)
    lengths = left_out.look.prompts
    assert lengths.most - lengths.least == 37 and lengths.least < lengths.median < lengths.most
    shortened = check(tmp_path, {"data": data | {"too_long": "truncate"}}, look=True)
    assert shortened.look is not None and (shortened.dropped, shortened.look.cut) == (0, 2)
    assert shortened.look.looked_at == 4 and "111" in shortened.look.prompt and shortened.look.answer == "1"
    assert check(tmp_path).look is None


@pytest.mark.parametrize(("answer", "says"), [("12", ""), (12, "a whole number"), ([1, 2], "a list")])
def test_a_look_says_what_an_answer_is(tmp_path: Path, answer: Any, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "12", "answer": answer}))
    look = check(tmp_path, {"data": {"train": "rows.jsonl"}}, look=True).look
    assert look is not None and look.answer_type == says


def test_a_look_shows_what_is_learnt_of_completions(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "12", "completion": "3" * length}) + "\n" for length in (2, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    data = {"train": "rows.jsonl", "max_sample_tokens": 10, "too_long": "truncate", "shuffle": False}
    look = check(tmp_path, {"algorithm": "sft", "data": data}, look=True).look
    assert look is not None and look.cut == 1 and look.completions is not None
    assert look.completions.least < look.completions.most <= 10 and look.said[0].startswith("33")
