"""The recipes of `examples/`: what each says holds, and each runs, with a small base in place of its own."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lorad.box.config import Config
from lorad.preflight.backends import check_backends
from lorad.rl.reward import RewardInput, gsm8k
from lorad.spec.model import Spec
from lorad.spec.text import load_spec
from tests.kit.world import REPOSITORY, World, world

pytestmark = pytest.mark.system

EXAMPLES = REPOSITORY / "examples"
SMALL = (
    *(
        "model.path=builtin:tiny",
        "data.train=sort",
        "data.eval=null",
        "reward=exact_match",
        "data.max_prompt_tokens=64",
    ),
    *("data.prompts_per_step=4", "rollout.max_new_tokens=12", "trainer.steps=2", "eval.problems=8"),
    *(
        "trainer.tp=1",
        "trainer.dp=1",
        "trainer.ep=1",
        "trainer.backend_args={}",
        "rollout.backend=builtin",
        "rollout.servers=1",
        "rollout.tp=1",
    ),
    *("data.streaming=false", "data.prompt_format=null", "data.answer_key=answer", "data.system=null"),
)


def spec_of(recipe: str) -> Spec:
    return load_spec((EXAMPLES / f"{recipe}.yaml").read_text(), source=recipe)


SMALL_ONES = (
    "demo",
    "demo-moe",
    "own-loss",
    "lookup",
    "spell_backward",
    "calculator",
    "agents_sdk",
    "smollm2-addition",
    "smollm2-gsm8k",
)  # with tests of their own, or for a CPU
OF_THE_HUB = {"prime-reverse-text", "nemo-qwen3-8b"}  # their rows need no script
# on the small base these go the way of another that CI runs: algorithm and adapter are alike
ALIKE = {"miles-moe", "vime-qwen3-4b", "verl-gsm8k-lora-1.5b"}
RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.yaml") if path.stem not in SMALL_ONES)


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as home:
        yield home


def script_of(name: str) -> ModuleType:
    """Import a file of `examples/`, which is no module of a package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_of("gsm8k")


@pytest.mark.parametrize("recipe", RECIPES)
def test_backends_and_sizes_of_a_recipe_fit(recipe: str) -> None:
    spec = spec_of(recipe)
    check_backends(spec, Config())
    assert spec.gpus == spec.trainer.ranks == spec.rollout.servers * spec.rollout.tp, (
        "all GPUs train, then all sample"
    )


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.long] if name in ALIKE else []) for name in RECIPES]
)
def test_a_recipe_runs_on_the_builtin_base(made: World, recipe: str) -> None:
    flags = ("--trainer", "builtin", "--name", recipe, "--wait")
    made.lorad("run", EXAMPLES / f"{recipe}.yaml", *SMALL, *flags)
    run = made.client.show(recipe)
    assert (run.reason, run.step) == ("completed", 2)
    assert {version.rank for version in made.client.adapters(recipe)} == {spec_of(recipe).lora.rank}


def test_both_losses_of_ones_own_are_equal(made: World) -> None:
    """`own-loss.yaml` runs, and its loss in numpy does as the one in torch."""
    spec = EXAMPLES / "own-loss.yaml"
    mine = f"algorithm.loss={EXAMPLES}/own_loss.py:same_loss"
    few = 2
    for name, keys in (
        ("in-torch", ("trainer.steps=10", "eval={every: 10, problems: 48}")),
        ("in-numpy", (f"trainer.steps={few}", mine, "eval.every=0")),
    ):
        made.lorad("run", spec, *keys, "data.prompts_per_step=8", "--name", name, "--wait")
    in_torch, in_numpy = made.facts("in-torch"), made.facts("in-numpy")
    assert {step: in_torch["samples"][step] for step in range(1, few + 1)} == in_numpy["samples"]
    assert in_torch["evals"][-1][1] > in_torch["evals"][0][1] + 0.2


@pytest.mark.long
def test_words_are_learnt_backwards(made: World) -> None:
    pytest.importorskip("reasoning_gym")
    made.lorad("run", EXAMPLES / "spell_backward.yaml", "--name", "words", "--wait")
    assert (made.client.show("words").eval_last or 0.0) >= 0.9


def test_gsm8k_rows_ask_for_the_rewards_mark(script: ModuleType) -> None:
    problem = {"question": "How much are 2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}
    (row,) = script.rows([problem])
    assert row["prompt"].startswith(problem["question"]) and "####" in row["prompt"]
    assert gsm8k(RewardInput(row["prompt"], "So it is\n#### 1004", row["answer"], "stop")) == 1.0


def test_every_recipe_reads_what_the_script_writes(script: ModuleType) -> None:
    wanted = {f"{script.DEFAULT}/train.jsonl", f"{script.DEFAULT}/test.jsonl"}
    data = [spec_of(recipe).data for recipe in RECIPES if recipe not in OF_THE_HUB]
    assert {path for each in data for path in (each.train, each.eval)} == wanted
    assert Path(script.DEFAULT).name == "gsm8k"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<reversed_text>cba</reversed_text>", 1.0),
        ("Here: <reversed_text>\ncba\n</reversed_text>, <reversed_text>x</reversed_text>", 1.0),
        ("<reversed_text>abc</reversed_text>", 1 / 3),  # one letter of three in a matching block
        ("<reversed_text>cbaz</reversed_text>", 6 / 7),
        ("cba", 0.0),
        ("<reversed_text>cba", 0.0),
    ],
)
def test_reversed_texts_are_scored_by_likeness(completion: str, reward: float) -> None:
    assert script_of("reverse_text").score(completion, "abc") == pytest.approx(reward)


def test_sentences_become_rows_to_reverse(tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("Too short.\n\nIt stands on\ntwo lines. It is a sentence, too!\n")
    script_of("reverse_text").main(str(tmp_path / "rows.jsonl"), [str(tmp_path / "text.md")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["It stands on two lines.", "It is a sentence, too!"]
    assert all(script_of("reverse_text").score(row["completion"], row["prompt"]) == 1 for row in rows)


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ("prime-reverse-text", {"prompt": "A text."}),
        ("nemo-qwen3-8b", {"problem": "2+2?", "expected_answer": "4", "generated_solution": "It is 4."}),
    ],
)
def test_a_recipe_takes_rows_as_published(made: World, recipe: str, row: dict[str, str]) -> None:
    """Rows and reward of the recipe, with the base and the sizes of `SMALL` alone."""
    rows = made.root / f"{recipe}.jsonl"
    rows.write_text(f"{json.dumps(row)}\n" * 4)
    own = ("data.train=", "reward=", "data.prompt_format=", "data.answer_key=", "data.max_prompt_tokens=")
    small = [key for key in SMALL if not key.startswith(own)]
    flags = (f"data.train={rows}", "--trainer", "builtin", "--name", f"{recipe}-rows", "--wait")
    made.lorad("run", EXAMPLES / f"{recipe}.yaml", *small, *flags)
    assert made.client.show(f"{recipe}-rows").step == 2
