"""lm-eval and inspect-ai, as they are published, against the gateway: their figures are lorad's own.

LORAD_SUITES_PYTHON names an interpreter that has both; without it these tests are skipped.
"""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lorad.rl.tokenizer import Tokenizer
from tests.gateway.test_refusals import answers, free_port
from tests.kit.pool_kit import TINY
from tests.kit.world import World, world

VARIABLE = "LORAD_SUITES_PYTHON"
PYTHON = os.environ.get(VARIABLE, "")
SECRET = "correct-horse-battery"
PROBLEMS, RUN = 48, "sorter"
SPEC = """
algorithm: {group_size: 4}
data: {train: train.jsonl, eval: test.jsonl, prompts_per_step: 8}
reward: exact_match
trainer: {lr: 2.0e-3, steps: 8}
rollout: {max_new_tokens: 12}
eval: {every: 8, problems: 48}
"""
GENERATE = """
task: sorted
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def sorting():
    fields = FieldSpec(input="prompt", target="answer")
    return Task(dataset=json_dataset(FILE, fields), solver=generate(), scorer=match("exact"))
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason=f"{VARIABLE} names no interpreter with lm-eval and inspect-ai"),
]


class Served(NamedTuple):
    world: World
    url: str
    score: float  # of lorad's own evaluation
    version: str
    path: Path
    problems: list[dict[str, Any]]


def problem(rng: random.Random) -> dict[str, Any]:
    digits = [str(rng.randrange(10)) for _ in range(rng.randrange(3, 7))]
    answer = "".join(sorted(digits))
    others = {"".join(rng.sample(answer, len(answer))) for _ in range(3)} | {answer[::-1]}
    choices = sorted({answer, *others})
    return {
        "prompt": f"S:{''.join(digits)}=",
        "answer": answer,
        "choices": choices,
        "label": choices.index(answer),
    }


def write(path: Path, problems: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    rng = random.Random(0)
    with world() as made:
        problems = [problem(rng) for _ in range(PROBLEMS)]
        write(made.root / "test.jsonl", problems)
        write(made.root / "train.jsonl", [problem(rng) for _ in range(64)])
        port, tokens = free_port(), made.root / "tokens.yaml"
        tokens.write_text(f"alice: {SECRET}\n")
        tokens.chmod(0o600)
        made.home.root.mkdir(exist_ok=True)
        made.home.config.write_text(f"gateway: {{port: {port}, tokens: {tokens}}}\n")
        made.run(RUN, text=SPEC)
        [*_, version] = made.client.adapters(RUN)
        made.lorad("swap", "bot", f"{RUN}@{version.version}")
        made.until(lambda: answers(port), "the gateway answers on its port")
        score = made.client.evals(RUN)[-1].score
        assert score is not None and 0 < score < 1
        path = made.home.root / "runs" / RUN / "versions" / f"{version.version:06d}"
        yield Served(made, f"http://127.0.0.1:{port}", score, f"{RUN}@{version.version}", path, problems)


def run(served: Served, *command: object) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(served.world.root / "hf")}
    keys = {"OPENAI_API_KEY": SECRET, "LORAD_API_KEY": SECRET, "LORAD_BASE_URL": f"{served.url}/v1"}
    done = subprocess.run(
        [PYTHON, "-m", *map(str, command)],
        env=os.environ | offline | keys,
        cwd=served.world.root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def task_file(served: Served, name: str, text: str) -> Path:
    path = served.world.root / name
    path.write_text(text.replace("FILE", str(served.world.root / "test.jsonl")))
    return path


def test_lm_eval_generates_what_lorad_does(served: Served) -> None:
    root = served.world.root
    task = task_file(served, "sorted.yaml", GENERATE)
    model = f"model=bot,base_url={served.url}/v1/completions,tokenizer={TINY},num_concurrent=4"
    asked = ["lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", task]
    run(served, *asked, "--output_path", root / "out")
    [found] = (root / "out").rglob("results_*.json")
    result = json.loads(found.read_text())["results"]["sorted"]
    assert result["exact_match,none"] == pytest.approx(served.score)


def test_inspect_generates_what_lorad_does(served: Served) -> None:
    task = task_file(served, "sorting.py", INSPECT.replace("FILE", "'FILE'"))
    asked = ("bot", "--suite", f"inspect:{task}", "--python", PYTHON, "--max-new-tokens", 12)
    result = served.world.json("eval", *asked)
    assert result["metrics"]["accuracy"] == result["metrics"]["score"] == pytest.approx(served.score)
    assert (result["problems"], result["failed"], result["suite"]) == (PROBLEMS, 0, "inspect")
    [kept] = [one for one in served.world.client.results(RUN) if one.suite == "inspect"]
    assert f"{RUN}@{kept.version}" == served.version and kept.metrics == result["metrics"]


def test_lm_eval_chooses_what_transformers_does(served: Served) -> None:
    task = task_file(served, "choices.yaml", CHOOSE)
    asked = ("bot", "--suite", f"lm_eval:{task}", "--python", PYTHON, "--out", "lm")
    found = served.world.json("eval", *asked)["metrics"]
    assert list((served.world.root / "lm").rglob("results_*.json"))
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model, tokenizer = PeftModel.from_pretrained(base, str(served.path)).eval(), Tokenizer(TINY)

    def likelihood(prompt: str, choice: str) -> float:
        asked, said = tokenizer.encode(prompt), tokenizer.encode(choice)
        with torch.no_grad():
            logprobs = model(torch.tensor([[*asked, *said]])).logits[0].log_softmax(-1)
        return float(sum(logprobs[len(asked) - 1 + place, token] for place, token in enumerate(said)))

    right = [
        max(problem["choices"], key=lambda choice: likelihood(problem["prompt"], choice)) == problem["answer"]
        for problem in served.problems
    ]
    assert sum(right) > 0
    assert found["acc"] == pytest.approx(sum(right) / len(right))
