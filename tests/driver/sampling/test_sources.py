"""Sources with an environment or a reward of their own: each row is judged by what its source names."""

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.daemon.record.audit import audit
from lorad.errors import SpecError
from lorad.preflight.__main__ import preflight
from lorad.rl.doubts import refuse_contradictions
from lorad.rl.tasks import problem
from lorad.spec.text import load_spec
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

REWARD = """
def score(completion, level):
    return level / 2 + len(completion) % 2 / 4
"""
ENVS = """
import time
from lorad.envs.lookup import Lookup

class Later(Lookup):
    def reset(self, row, seed):
        return super().reset(row | {"prompt": f"R:{time.time_ns()}="}, seed)
"""
TRAIN: dict[str, Any] = {
    "sums.jsonl": {"weight": 2, "reward": {"name": "reward.py:score", "workers": 1}},
    "store.jsonl": {"env": {"name": "lookup", "turns": 3, "workers": 1}},
    "plain.jsonl": 1,
}
PLAIN = "data.chat_template=never"
CAREFUL = (
    "algorithm.dynamic_sampling={max_batches: 3}",
    "data.difficulty={easy: 0.9, hard: 0.05, keep_easy: 0.5, keep_hard: 0.5}",
    "trainer.steps=4",
    "checkpoint.every=2",
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with files of rows, of which those of `sums.jsonl` have no answers."""
    kinds = {"store.jsonl": "lookup", "plain.jsonl": "sort"}
    rows = {name: [problem(task, "train", 0, n) for n in range(6)] for name, task in kinds.items()}
    lines = {
        name: [json.dumps({"prompt": one.prompt, "answer": one.answer}) for one in some]
        for name, some in rows.items()
    }
    lines["sums.jsonl"] = [json.dumps({"prompt": f"S:{n}{n + 1}=", "level": 1}) for n in range(6)]
    for name, some in lines.items():
        (tmp_path / name).write_text("\n".join(some))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "envs.py").write_text(ENVS)
    return tmp_path


def mixed(running: Running, home: Path, name: str, *overrides: str) -> Driven:
    how = (f"data.train={json.dumps(TRAIN)}", PLAIN, "eval.every=0", "trainer.steps=2")
    return Driven(running, home, name, *how, *overrides)


def by_source(run: Driven) -> dict[str, list[dict[str, Any]]]:
    samples = defaultdict[str, list[dict[str, Any]]](list)
    for fact in run.facts("step"):
        for line in (run.run.root / fact.data["samples"]).read_text().splitlines():
            sample = msgspec.json.decode(line)
            samples[sample["source"]].append(sample)
    return samples


def test_each_row_is_judged_by_its_source(running: Running, home: Path) -> None:
    run = mixed(running, home, "judged")
    assert run.drive().reason == "completed"
    samples = by_source(run)
    assert {name: len(some) for name, some in samples.items()} == {
        "sums.jsonl": 16, "store.jsonl": 8, "plain.jsonl": 8,
    }  # fmt: skip
    assert all(sample["turns"] for sample in samples["store.jsonl"])
    assert not any("turns" in s for name in ("sums.jsonl", "plain.jsonl") for s in samples[name])
    assert {sample["reward"] for sample in samples["sums.jsonl"]} <= {0.5, 0.75}
    last = run.facts("step")[-1].data["metrics"]
    for name in TRAIN:
        of_step = [s["reward"] for s in samples[name] if s["step"] == 2]
        assert last[f"reward_of/{name}"] == pytest.approx(sum(of_step) / len(of_step))
    assert {"turns", "observation_tokens"} <= last.keys()
    inputs = run.facts("attempt")[0].data["inputs"]
    assert Path(inputs["train.sums.jsonl.reward"]["path"]).name == "reward.py"
    assert audit(run.run.root) == []


@pytest.mark.system
@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.long), 2])
def test_killed_mixture_equals_an_undisturbed_one(running: Running, home: Path, lag: int) -> None:
    how = (*CAREFUL, f"rollout.max_staleness={lag}")
    calm, run = (mixed(running, home, f"{name}-{lag}", *how) for name in ("even", "struck"))
    assert calm.drive().reason == "completed"
    assert run.struck(3, signal.SIGKILL) == -signal.SIGKILL
    assert run.drive().reason == "completed"
    assert run.outcome() == calm.outcome()
    assert any(fact.data["metrics"].get("prompts_hard") for fact in calm.facts("step"))


@pytest.mark.system
def test_held_out_rows_are_judged_by_theirs(running: Running, home: Path) -> None:
    held_out = {"store.jsonl": {"env": "lookup"}, "sums.jsonl": {"reward": "reward.py:score"}}
    run = mixed(running, home, "held", f"data.eval={json.dumps(held_out)}", "eval.every=2", "eval.problems=8")
    assert run.drive().reason == "completed"
    (fact,) = [fact for fact in run.facts("eval") if fact.step == 2]
    lines = (run.run.root / fact.data["samples"]).read_text().splitlines()
    samples = [msgspec.json.decode(line) for line in lines]
    assert {(s["source"], "turns" in s) for s in samples} == {("store.jsonl", True), ("sums.jsonl", False)}
    assert min(s["reward"] for s in samples if s["source"] == "sums.jsonl") >= 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sums.jsonl": {"reward": "exact_match"}}, "sums.jsonl: exact_match needs answer"),
        ({"plain.jsonl": {"reward": "reward.py:score"}}, "plain.jsonl: reward.py:score needs level"),
        ({"store.jsonl": {"env": "envs.py:Later"}}, "store.jsonl: envs.py:Later: reset answered two"),
        ({"store.jsonl": {"env": "shop"}}, "there is no environment 'shop'"),
        ({"sums.jsonl": 1}, "the key 'answer' is missing"),
        (
            {"store.jsonl": {"env": {"name": "lookup", "max_tokens": 100_000}}},
            "100000 is more than the 2048 positions",
        ),
    ],
)
def test_what_a_source_cannot_have_is_named(home: Path, changes: dict[str, Any], words: str) -> None:
    spec = load_spec("", overrides=[f"data.train={json.dumps(TRAIN | changes)}", PLAIN])
    with pytest.raises(SpecError, match=words.replace("(", r"\(")):
        preflight(spec, cwd=home)


HUB = {"verifiers:sums": {"env": {"python": "python3"}}}


@pytest.mark.parametrize(
    ("train", "more", "words"),
    [
        (TRAIN, "algorithm=sft", "sft trains on the completions of the data, and judges none"),
        ({"a.jsonl": {"env": {"turns": 3}}}, "seed=0", "nothing is played in an environment without a name"),
        ({"a.jsonl": {"env": "verifiers:sums"}}, "seed=0", "verifiers:sums has rows of its own"),
        (HUB | {"verifiers:me/sums": 1}, "seed=0", "the environment sums brings its own rows twice"),
        ({"verifiers:sums": {"env": {"sandbox": "bubblewrap"}}}, "seed=0", "which a sandbox has none of"),
        (["verifiers:sums", "a.jsonl"], "seed=0", "not the rows of verifiers:sums"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(train: Any, more: str, words: str) -> None:
    spec = load_spec("", overrides=[f"data.train={json.dumps(train)}", more])
    with pytest.raises(SpecError, match=words):
        refuse_contradictions(spec)


def test_a_source_has_one_judge_and_a_weight() -> None:
    for source, words in (
        ({"env": "lookup", "reward": "gsm8k"}, "name one of env and reward"),
        ({"weight": 0, "reward": "gsm8k"}, "a weight is a number above 0"),
        ({"rewards": "gsm8k"}, "unknown field"),
    ):
        with pytest.raises(SpecError, match=words):
            load_spec("", overrides=[f"data.train={json.dumps({'a.jsonl': source})}"])


def test_sources_of_the_hub_imply_what_they_need() -> None:
    spec = load_spec("", overrides=[f"data.train={json.dumps(HUB | {'a.jsonl': 2})}"])
    (own,) = spec.of_sources.values()
    assert (own.env.name, own.env.workers, own.env.concurrency) == ("verifiers:sums", 1, 16)
    assert spec.deterministic is False and spec.env.name is None


def test_the_run_bounds_failures_of_environments() -> None:
    own: dict[str, Any] = {"a.jsonl": {"env": "lookup"}, "b.jsonl": 1}
    share = "reward={name: gsm8k, max_failures: 0.8}"
    assert load_spec("", overrides=[f"data.train={json.dumps(own)}", share]).max_failures == 0.8
    own["b.jsonl"] = {"reward": {"name": "gsm8k", "max_failures": 0.1}}
    assert load_spec("", overrides=[f"data.train={json.dumps(own)}", share]).max_failures == 0.1
