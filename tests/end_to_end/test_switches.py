"""Every switch of a spec, turned from outside: it changes what it names, and nothing else."""

import json
import signal
from collections.abc import Iterator
from itertools import groupby
from os import kill
from pathlib import Path
from typing import Any

import pytest

from lorad.models.directory import resolve
from lorad.protocol.journal import lineage, read
from tests.kit.world import SMALL, World, world

pytestmark = pytest.mark.system

QUICK = (
    SMALL.replace("steps: 6", "steps: 2")
    .replace("every: 2}", "every: 50}")
    .replace("tokens: 12", "tokens: 8")
)
REWARD = """
print("imported")

def loud(prompt, completion, answer, **_):
    print("scored", prompt)
    return float(completion == answer)
"""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        rows = [{"prompt": f"S:{n}=", "answer": "".join(sorted(str(n)))} for n in (312, 4231, 52)]
        (it.root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (it.root / "rewards.py").write_text(REWARD)
        yield it


@pytest.fixture(scope="module")
def plain(made: World) -> str:
    """The digest that a run without any switch ends with."""
    return digest(made, "plain")


@pytest.fixture(scope="module")
def first_step(made: World) -> str:
    """The same of one step, which each switch of the weights has a part in."""
    return digest(made, "first-step", "trainer.steps=1")


def digest(made: World, name: str, *overrides: str) -> str:
    made.run(name, *overrides, text=QUICK)
    sha256: str = made.client.adapters(name)[-1].sha256
    return sha256


def metric(made: World, run: str, key: str) -> list[float]:
    return [step.metrics[key] or 0.0 for step in made.client.steps(run)]


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("mean", "algorithm.scale=one"),
        ("sequence", "algorithm.level=sequence"),
        ("loo", "algorithm.name=rloo"),
        ("weighted", "algorithm={name: cispo, epochs: 2, group_size: 4, bounds: [0.99, 1.0]}"),
        ("cap", "algorithm.importance_cap=0.5"),
        ("correction", "algorithm.correction={kind: token_truncate, high: 0.5}"),
        ("clip", "algorithm={epochs: 2, group_size: 4, clip: [0.001, 0.001]}"),
        ("decay", "trainer.weight_decay=1.0"),
        ("norm", "trainer.max_grad_norm=1.0e-6"),
        ("dropout", "lora.dropout=0.3"),
        ("rslora", "lora.rslora=true"),
        ("xavier", "lora.init=xavier"),
        ("dora", "lora.dora=true"),
        ("loraplus", "trainer.loraplus_lr_ratio=4"),
    ],
)
def test_a_switch_changes_the_weights(made: World, first_step: str, name: str, override: str) -> None:
    assert digest(made, name, override, "trainer.steps=1") != first_step


def test_what_does_not_concern_the_weights_changes_none(made: World, plain: str, first_step: str) -> None:
    assert (
        digest(made, "watched", "eval={every: 1, problems: 8}", "checkpoint.every=1", "lora.type=lora")
        == plain
    )
    assert made.client.adapters("watched")[1].sha256 == first_step
    assert [e.step for e in made.client.evals("watched")] == [0, 1, 2] and made.client.evals("plain") == []


@pytest.mark.parametrize("kl", ["0", "0.1"])
def test_dropping_groups_without_variance_changes_cost_only(made: World, kl: str) -> None:
    often = (
        "algorithm.minibatches=4",
        "trainer.weight_decay=0.1",
        f"algorithm.kl.coef={kl}",
    )
    names = {x: f"drop-{x}-{kl}" for x in ("true", "false")}
    drop, keep = (
        digest(made, name, f"algorithm.drop_zero_variance={x}", *often) for x, name in names.items()
    )
    assert drop == keep and max(metric(made, names["true"], "zero_variance_groups")) > 0


def test_kl_is_zero_only_before_first_update(made: World) -> None:
    made.run("k3", "algorithm.kl={coef: 0.1, type: k3}", text=QUICK)
    first, second = metric(made, "k3", "kl")
    assert first == 0 and second > 0


def test_only_second_epochs_are_off_policy(made: World, plain: str) -> None:
    made.run("epochs", "algorithm.epochs=2", text=QUICK)
    assert set(metric(made, "plain", "ratio")) == {1.0} and set(metric(made, "plain", "clip_fraction")) == {
        0.0
    }
    assert 1.0 not in metric(made, "epochs", "ratio") and min(metric(made, "epochs", "clip_fraction")) > 0


def test_learning_rate_follows_its_schedule(made: World) -> None:
    """Two steps of warm-up, then a third of the way from 2e-3 to 1e-3."""
    trainer = "{lr: 2.0e-3, min_lr: 1.0e-3, steps: 4, warmup_steps: 2, schedule_steps: 5, schedule: cosine}"
    made.run("cosine", f"trainer={trainer}", text=QUICK)
    assert metric(made, "cosine", "lr") == pytest.approx([1e-3, 2e-3, 2e-3, 1.75e-3])


def test_all_spellings_of_target_modules_are_equal(made: World) -> None:
    found = digest(made, "named", "lora.target_modules=[linear_qkv]")
    assert found == digest(made, "excluded", "lora.exclude_modules=[o_proj, linear_fc1, down_proj]")


def test_adapter_path_begins_with_the_exported_version(made: World, plain: str) -> None:
    made.lorad("export", "plain@2", "exported")
    made.run("warm", "lora.adapter_path=exported", text=QUICK)
    assert made.client.adapters("warm")[0].sha256 == plain
    error = made.lorad("run", made.spec(), "lora.adapter_path=exported", "lora.rank=4", expect=2).stderr
    assert "override lora.rank=4: lora.rank: 4 here but 16 in" in error and "adapter_config.json (r)" in error


def test_adapter_path_supplies_what_the_spec_leaves_open(made: World) -> None:
    shape = "lora={rank: 4, alpha: 12, target_modules: [q_proj, v_proj], rslora: true}"
    made.run("small", shape, text=QUICK)
    made.lorad("export", "small@2", "small-adapter")
    checked = made.lorad("check", made.spec(QUICK), "lora.adapter_path=small-adapter").stdout
    made.run("further", "lora.adapter_path=small-adapter", text=QUICK)
    for told in (checked, made.lorad("show", "further").stdout):
        assert "rank 4, alpha 12, rslora" in told and "q_proj, v_proj; begins as " in told
    begun, parent = made.client.adapters("further")[0], made.client.adapters("small")[2]
    assert (begun.sha256, begun.rank, begun.alpha) == (parent.sha256, 4, 12)
    again = made.lorad("fork", "further@2", "lora.rank=4", "--fresh", "--json").stdout  # says what it is
    assert '"warnings"' in again
    made.lorad("fork", "further@2", "lora.rank=8", "--fresh", expect=2)


def test_top_k_and_stop_cut_what_is_sampled(made: World) -> None:
    made.run("greedy", "rollout.top_k=1", "rollout.stop=['6']", text=QUICK)
    samples = made.client.samples("greedy", step=1)
    for _, group in groupby(samples, key=lambda s: s.prompt_id):
        assert len({s.completion for s in group}) == 1
    assert any(s.finish == "stop" for s in samples) and not any("6" in s.completion for s in samples)


def test_few_rows_are_repeated_with_a_warning(made: World) -> None:
    error = made.lorad("run", made.spec(QUICK), "data.train=rows.jsonl", "--name", "few", "--wait").stderr
    warning = "data: 3 prompts are fewer than data.prompts_per_step"
    assert f"warning: {warning}" in error and warning in made.lorad("show", "few").stdout
    ids = [s.prompt_id for step in (1, 2) for s in made.client.samples("few", step=step)]
    assert len(set(ids)) == 8 and {name.split("/")[1] for name in ids} == {"1", "2", "3"}


def test_too_long_prompts_are_cut_or_dropped(made: World) -> None:
    data = ("data.train=rows.jsonl", "data.max_prompt_tokens=6", "data.too_long=drop")
    made.run("drop", *data, text=QUICK)
    assert {s.prompt for s in made.client.samples("drop", step=1)} == {"S:312=", "S:52="}
    assert "1 prompts are longer" in str(made.client.show("drop").warnings)


def test_prints_of_a_reward_reach_the_log(made: World) -> None:
    run = made.run("loud", "data.train=rows.jsonl", "reward=rewards.py:loud", text=QUICK)
    assert run.reason == "completed" and metric(made, "loud", "failed_rewards") == [0, 0]
    assert "scored S:52=" in made.lorad("logs", "loud").stdout


def test_bfloat16_trains_on_the_cpu(made: World) -> None:
    made.run("half", "model.dtype=bfloat16", text=QUICK)
    assert (
        0 < max(metric(made, "half", "logprob_difference")) < 0.05
        and min(metric(made, "half", "grad_norm")) > 0
    )


def test_a_model_directory_of_transformers_trains(made: World) -> None:
    a_model(made.root / "untied")
    overrides = ("model.path=untied", "data.max_prompt_tokens=64", "reward={name: regex, pattern: '[0-3]'}")
    run = made.run("own", *overrides, text=QUICK)
    assert run.reason == "completed" and max(metric(made, "own", "grad_norm")) > 0
    assert max(metric(made, "own", "logprob_difference")) < 1e-5


def test_another_architecture_is_refused_by_its_name(made: World) -> None:
    from transformers import GemmaConfig

    a_model(made.root / "gemma")
    GemmaConfig(architectures=["GemmaForCausalLM"]).save_pretrained(made.root / "gemma")
    assert "GemmaForCausalLM" in made.lorad("run", made.spec(), "model.path=gemma", expect=2).stderr


def test_generating_during_a_run_changes_nothing(made: World) -> None:
    overrides = ("trainer.steps=8", "lora.dropout=0.1")
    calm = digest(made, "calm", *overrides)
    for pool in made.client.pools():
        made.client.stop_pool(pool.pool)
    made.until(lambda: not made.client.pools(), "no pool is warm")
    made.lorad("run", made.spec(QUICK), *overrides, "--name", "asked", "--detach")
    made.reached("asked", 1)
    answer = made.json("generate", "asked", "S:4213=", "-n", 3, "--temperature", 1)
    assert len(answer["completions"]) == 3 and made.over("asked").reason == "completed"
    assert made.client.adapters("asked")[-1].sha256 == calm


def test_kills_and_an_older_checkpoint_leave_one_lineage(made: World) -> None:
    # it is not over when it is killed
    overrides = ("trainer.steps=14", "checkpoint.every=2", "checkpoint.keep=16")
    made.run("straight", *overrides, text=QUICK)
    made.lorad("run", made.spec(QUICK), *overrides, "--name", "bent", "--detach")
    for step in (3, 5):
        made.reached("bent", step)
        kill(made.pid("bent", "driver"), signal.SIGKILL)
        made.over("bent")
        made.lorad("resume", "bent", *(["--from", 2, "--wait"] if step == 5 else ["--detach"]))
    assert made.facts("bent") == made.facts("straight")
    records = [record for record, _ in read(Path(made.client.show("bent").directory) / "journal.jsonl")]
    journaled = [(r.step, r.attempt, r.data["version"]) for r in lineage(records) if r.kind == "step"]
    assert journaled == [(s.step, s.attempt, s.version) for s in made.client.steps("bent")]
    numbers = [v.version for v in made.client.adapters("bent")]
    assert numbers == sorted(set(numbers)) and len(numbers) > 9


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("run", "spec.yaml", "--name", "a/b"), 2, "A name is"),
        (("run", "spec.yaml", "--name", ""), 2, "A name is"),
        (("run", "spec.yaml", "trainer.lr=.nan"), 2, "not a finite number"),
        (("run", "spec.yaml", "lora.alpha=1e999"), 2, "not a finite number"),
        (("run", "spec.yaml", "seed=18446744073709551616"), 2, "seed: Expected int <="),
        (("run", "spec.yaml", "trainer.steps=9223372036854775808"), 2, "trainer.steps: Expected int <="),
        (("run", "spec.yaml", "algorithm.level=word"), 2, "Choose one of: token, sequence"),
        (("run", "spec.yaml", "rollout.temperature=1e-300"), 2, "rollout.temperature"),
        (("run", "spec.yaml", "rollout.engine_args={a: 1}"), 2, "the builtin engine takes none"),
        (("run", "/dev/zero"), 2, "larger than 1 MiB"),
        (("run", "binary.yaml"), 2, "not UTF-8"),
        (("show", "../plain"), 3, "no run named ../plain"),
        (("show", ""), 3, "no run named"),
        (("stop", "plain"), 1, "has ended already"),
        (("resume", "plain", "--steps", 2**70), 2, "2147483647"),
        (("samples", "plain", "--step", 9), 3, "no step 9"),
        (("generate", "plain", ""), 2, "the prompt is empty"),
        (("generate", "plain", "S:1=" * 600), 2, "2048 positions"),
        (("generate", "plain@99", "S:1="), 3, "no version plain@99"),
        (("generate", "plain@\u00b2", "S:1="), 2, "not a version"),
        (("export", "plain@2", "."), 1, "not empty"),
        (("plot", "plain", "--out", "/nowhere/x.png"), 2, "no directory /nowhere"),
        (("plot", "plain", "--metric", "magic"), 3, "plain: no metric magic"),
        (("plot", "no-such-*"), 3, "no run is named like no-such-*"),
    ],
)
def test_mistakes_have_messages_and_exit_codes(
    made: World, plain: str, arguments: tuple[Any, ...], code: int, told: str
) -> None:
    (made.root / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    made.spec()
    done = made.lorad(*arguments, expect=code)
    assert told in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_impossible_home_is_an_error(made: World) -> None:
    error = made.lorad("run", made.spec(), expect=1, LORAD_HOME="/dev/null/home").stderr
    assert "cannot be used as home" in error and "Traceback" not in error


def test_home_can_have_spaces_and_long_paths(made: World) -> None:
    deep = str(made.root / "a home" / ("x" * 120))
    made.lorad("daemon", "start", LORAD_HOME=deep)
    assert made.lorad("list", LORAD_HOME=deep).returncode == 0
    made.lorad("daemon", "stop", LORAD_HOME=deep)


def a_model(directory: Path) -> None:
    """A random, sharded, untied Qwen3 with the tokenizer of builtin:tiny."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny = resolve("builtin:tiny")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    config = Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=False, eos_token_id=1, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(directory, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((tiny / name).read_bytes())
