"""Samples are scored as they end, and what a run does depends on neither the time that it takes nor the
workers.
"""

import signal
import venv
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lorad.driver.rewards import Rewarder
from lorad.driver.sample import sample
from lorad.errors import SpecError
from lorad.rl.reward import RewardInput
from lorad.spec.reward import RewardSpec
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool

GRADERS = """
import asyncio, time
def plain(completion, answer):
    time.sleep(0.001 * (len(completion) % 3))
    return float(completion.strip() == answer.strip())
async def later(completion, answer):
    await asyncio.sleep(0.001 * (len(completion) % 3))
    return float(completion.strip() == answer.strip())
def lists(completions, answer):
    return [float(c.strip() == a.strip()) for c, a in zip(completions, answer)]
def slow(completion):
    time.sleep(0.05)
    return {"length": len(completion), "one": 1}
"""
SHORT = ("eval.every=2", "eval.problems=4", "trainer.steps=2", "checkpoint.every=2")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "graders.py").write_text(GRADERS)
    return tmp_path


@pytest.mark.system
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.long),
        ("rollout.max_staleness=1",),
        pytest.param(("algorithm.name=dapo",), marks=pytest.mark.long),
    ],
)
def test_form_and_workers_change_no_bit(running: Running, home: Path, more: tuple[str, ...]) -> None:
    found = []
    for number, (name, workers) in enumerate((("plain", 1), ("plain", 3), ("later", 2), ("lists", 2))):
        reward = f"{{name: graders.py:{name}, workers: {workers}}}"
        run = Driven(running, home, f"run{number}-{len(str(more))}", f"reward={reward}", *SHORT, *more)
        assert run.drive().reason == "completed"
        found.append(run.outcome())
    assert all(one == found[0] for one in found)


def test_components_are_metrics_and_in_samples(running: Running, home: Path) -> None:
    rewards = "[{name: exact_match}, {name: graders.py:slow, weight: 0.5, workers: 4}]"
    run = Driven(running, home, "parts", f"reward={rewards}", "trainer.steps=1", "eval.every=0")
    assert run.drive().reason == "completed"
    fact = run.facts("step")[0].data
    made = [msgspec.json.decode(line) for line in (run.run.root / fact["samples"]).read_text().splitlines()]
    assert fact["metrics"]["reward/slow/one"] == 1.0
    assert made[0]["rewards"]["slow"] == made[0]["rewards"]["slow/length"] + 1
    assert [s["reward"] for s in made] == [
        s["rewards"]["exact_match"] + 0.5 * s["rewards"]["slow"] for s in made
    ]


RAW = """
def alone(completion, raw_completion):
    return float(raw_completion.startswith(completion) and raw_completion != completion)
def lists(completions, raw_completions):
    pairs = zip(raw_completions, completions)
    return [float("1" not in text and raw.startswith(text)) for raw, text in pairs]
"""


@pytest.mark.system
def test_raw_text_has_what_stopped_it(running: Running, home: Path) -> None:
    (home / "raw.py").write_text(RAW)
    rewards = "[raw.py:alone, raw.py:lists, {name: regex, pattern: '1$', raw: true}]"
    how = ("rollout.stop=['1']", "rollout.max_new_tokens=16", "trainer.steps=1", "eval.every=0")
    run = Driven(running, home, "raw", f"reward={rewards}", *how)
    assert run.drive().reason == "completed"
    metrics = run.facts("step")[0].data["metrics"]
    assert metrics["reward/alone"] == metrics["reward/lists"] == 1.0 and metrics["reward/regex"] > 0


def test_functions_get_raw_text_they_ask_for(home: Path) -> None:
    (home / "raw.py").write_text("def raw(raw_completions, **rest): return map(len, raw_completions)")
    samples = [RewardInput("", "x", "", "stop", raw_completion=text) for text in ("x<|im_end|>", "")]
    rewards = [RewardSpec(name="raw.py:raw"), RewardSpec(name="regex", pattern="<.im_end.>$", raw=True)]
    with Rewarder(rewards, home) as rewarder:
        assert [score.value for score in rewarder.score(samples)] == [12.0, 0.0]
        assert rewarder.wants_raw


def test_scoring_begins_before_sampling_ends(running: Running, home: Path) -> None:
    called = home / "called"
    (home / "first.py").write_text(
        f"import pathlib\ndef reward(): pathlib.Path({str(called)!r}).touch(); return 1"
    )
    long = ("rollout.max_new_tokens=96", "rollout.temperature=2", "eval.every=0")
    with Driven(running, home, "early", "reward=first.py:reward", *long).begun() as session:
        session.rewarder.start()
        sample(session).scoring.scores()  # now the worker is there
        called.unlink()
        rollout = sample(session)
        assert called.exists()
        assert [s.value for s in rollout.scoring.scores()] == [1.0] * 16


@pytest.mark.parametrize(
    "code",
    [
        "def ids(completion_ids): return sum(completion_ids)",
        "def ids(completions, completion_ids): return [sum(ids) for ids in completion_ids]",
        "def ids(completions, **columns): return [sum(ids) for ids in columns['completion_ids']]",
    ],
)
def test_functions_get_tokens_they_ask_for(code: str, home: Path) -> None:
    (home / "ids.py").write_text(code)
    samples = [RewardInput("", "x", "", "stop", completion_ids=ids) for ids in ([3, 4], [5])]
    with Rewarder([RewardSpec(name="ids.py:ids")], home) as rewarder:
        assert [score.value for score in rewarder.begin([samples]).scores()] == [7.0, 5.0]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without any package."""
    made = tmp_path_factory.mktemp("apart")
    venv.create(made, with_pip=False)
    return made / "bin" / "python"


def test_another_interpreter_has_its_own_packages(bare: Path, home: Path) -> None:
    (home / "apart.py").write_text("""
import os, sys
def reward(completion):
    try:
        import msgspec
    except ImportError:
        paths = "PYTHONPATH" in os.environ
        return {"reward": len(completion), "ours": sys.prefix.endswith("apart0"), "paths": paths}
async def later(completion): return len(completion)
""")
    with Rewarder([RewardSpec(name="apart.py:reward", python=str(bare))], home) as rewarder:
        score = rewarder.score([RewardInput("", "abc", "", "stop")])[0]
    assert score.parts == {"ours": 1.0, "paths": 0.0} and score.value == 3.0
    with Rewarder([RewardSpec(name="apart.py:later", python=str(bare))], home) as rewarder:
        assert rewarder.score([RewardInput("", "abc", "", "stop")])[0].value == 3.0


def test_a_missing_interpreter_is_refused(home: Path) -> None:
    with pytest.raises(SpecError, match=r"reward.python: there is no program .*/none"):
        Rewarder([RewardSpec(name="graders.py:plain", python="none")], home)


def test_math_without_its_package_says_so(bare: Path, home: Path) -> None:
    rewarder = Rewarder([RewardSpec(name="math", python=str(bare))], home)
    with pytest.raises(SpecError, match=f"needs math-verify, which {bare} does not have") as refused:
        rewarder.start()
    assert "reward.python" in refused.value.hint


@pytest.fixture(scope="module")
def math(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rewarder]:
    """What takes a second to import."""
    pytest.importorskip("math_verify")
    with Rewarder([RewardSpec(name="math", workers=1)], tmp_path_factory.mktemp("math")) as rewarder:
        yield rewarder


@pytest.mark.system(but=["so \\\\boxed{\\\\frac{1}{2}}-0.5-1.0"])
@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{(1, 2)}", "(1,2)", 1.0),
        (r"it is $x+1$", "1 + x", 1.0),
        ("it is 73", "so 70 + 2 #### 72", 0.0),
    ],
)
def test_math_compares_values(completion: str, answer: str, value: float, math: Rewarder) -> None:
    assert math.score([RewardInput("", completion, answer, "stop")])[0].value == value


MIXTURE = "data.train={one.jsonl: 3, two.jsonl: 1}"


@pytest.mark.system
def test_killed_mixture_resumes_where_it_was(running: Running, home: Path) -> None:
    for name, count in (("one", 5), ("two", 3)):
        rows = [{"prompt": f"S:{name[0]}{i}=", "answer": str(i)} for i in range(count)]
        (home / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    (home / "which.py").write_text("def score(prompt): return float(prompt[2] == 'o')")
    how = (MIXTURE, "reward=which.py:score", "trainer.steps=4", "checkpoint.every=2")
    both = [Driven(running, home, name, *how) for name in ("calm", "killed")]
    assert both[0].drive().reason == "completed"
    assert both[1].struck(3, signal.SIGKILL) == -signal.SIGKILL
    assert both[1].drive().reason == "completed"
    assert both[0].outcome() == both[1].outcome()
    fact = both[1].facts("step")[-1].data
    assert (fact["metrics"]["reward_of/one.jsonl"], fact["metrics"]["reward_of/two.jsonl"]) == (1.0, 0.0)
    lines = (both[1].run.root / fact["samples"]).read_text().splitlines()
    found = [msgspec.json.decode(line)["source"] for line in lines]
    assert (found.count("one.jsonl"), found.count("two.jsonl")) == (12, 4)
