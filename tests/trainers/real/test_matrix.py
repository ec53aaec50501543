"""Every trainer with every engine: a run learns, each version is attested, and the base stays as it was.

`kill -9` of a server or of the trainer costs time only, and the checkpoint that is left can be continued by
PEFT and any other trainer.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorad.models.directory import resolve
from lorad.protocol.journal import read
from lorad.rl.tasks import problem
from tests.engines.real.test_whole_run import kill_server
from tests.kit.world import World
from tests.trainers.real.pairs import ENGINES, TRAINERS, configured, missing

DENSE, MIXTURE = "builtin:tiny", "builtin:tiny-moe"
# other runs in CI: with vLLM tests/engines/real/hybrids, with FSDP test_moves, of a mixture test_routes
IN_CI = {("megatron", "sglang", DENSE)}
CELLS = [
    pytest.param(
        trainer,
        engine,
        base,
        id=f"{trainer}-{engine}" + "-moe" * (base == MIXTURE),
        marks=[] if (trainer, engine, base) in IN_CI else pytest.mark.long,
    )
    for base in (DENSE, MIXTURE)
    for trainer in TRAINERS
    for engine in ENGINES
]
RANKS = {"builtin": 0, "fsdp": 2, "megatron": 2}  # processes of its own
SIZES = {"builtin": (), "fsdp": ("trainer.dp=2",), "megatron": ("trainer.tp=2",)}
OF_EXPERTS = {**SIZES, "megatron": ("trainer.dp=2", "trainer.ep=2")}
STEPS, KILLED_AT = 10, 5  # with this seed and rate as much is learnt as with others in 16
FEW_STEPS, KILLED_SOON = 7, 3  # where a server's steps take seconds, and a look is in time
SERVER_KILLED_AT = 2
LORA = ("--lora-rank", 8, "--target-modules", "all-linear")
SPEC = f"""
seed: 5
data: {{train: sort, eval: sort}}
trainer: {{lr: 2.0e-3, steps: {STEPS}}}
eval: {{every: 0}}
checkpoint: {{every: 2}}
"""


# PEFT says so of what it has made of the experts' pairs, and computes with them all the same
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
@pytest.mark.parametrize(("trainer", "engine", "base"), CELLS)
def test_every_pair_learns_resumes_and_exports(
    made: World, trainer: str, engine: str, base: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("pair", f"{trainer}-{engine}" + "-moe" * (base == MIXTURE))
    if absent := missing(trainer, engine):
        pytest.skip(f"{' and '.join(absent)}: no interpreter is named, `make test-backends` installs them")
    configure(made, trainer, engine)
    started = time.monotonic()
    flags = (*LORA, "--trainer", trainer, "--rollout", engine)
    is_quick = engine == "builtin" or base == MIXTURE
    steps, killed_at = (STEPS, KILLED_AT) if is_quick else (FEW_STEPS, KILLED_SOON)
    on = (
        *(f"model.path={base}", f"trainer.steps={steps}"),
        *(OF_EXPERTS if base == MIXTURE else SIZES)[trainer],
    )
    made.lorad("run", made.spec(SPEC), *on, *flags, "--name", "cell", "--detach")
    if engine != "builtin":
        reached(made, SERVER_KILLED_AT)
        kill_server(made, "cell", engine)
    reached(made, killed_at)
    assert len(made.client.show("cell").attempts) == 1, "the loss of a server must not end the run"
    kill_trainer(made)
    assert made.over("cell").reason == "lost"
    made.lorad("resume", "cell", "--detach")
    reached(made, steps)
    made.completed("cell")
    first, last = learned(made, steps)
    record_property("cell", f"{first:.2f} -> {last:.2f} in {time.monotonic() - started:.0f} s")
    attested_and_base_untouched(made)
    checkpoint = Path(made.client.checkpoints("cell")[-1].path)
    peft_sorts(base, checkpoint)
    a_fork_stays_with_its_start(made)
    another_trainer_goes_on(made, base, checkpoint, last)


# the rules of replayed routes are tried on ranks in CI: test_conformance
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_a_run_replays_routes_on_ranks(made: World, trainer: str, dtype: str) -> None:
    """In bfloat16 without being asked."""
    if missing(trainer):
        pytest.skip("no interpreter is named")
    configure(made, trainer)
    routes = "auto" if dtype == "bfloat16" else "record"
    how = f"model={{path: {MIXTURE}, dtype: {dtype}}}", f"rollout.routes={routes}", *OF_EXPERTS[trainer]
    few = "trainer.steps=4", "attest.amplified_every=1"
    flags = (*LORA, "--trainer", trainer, "--rollout", "builtin")
    made.lorad("run", made.spec(SPEC), *how, *few, *flags, "--name", "moe", "--detach")
    made.completed("moe")
    steps = made.client.steps("moe")
    assert {step.metrics["routes_unknown"] for step in steps} == {0.0}
    differ = max(step.metrics["routes_differ"] or 0.0 for step in steps)
    assert differ == 0 if dtype == "float32" else 0 < differ < 0.3
    assert {version.attested for version in made.client.adapters("moe")} <= {"passed", "inconclusive"}


def configure(made: World, *backends: str) -> None:
    made.home.root.mkdir(parents=True, exist_ok=True)
    made.home.config.write_text(json.dumps({"backends": configured(*backends)}))  # YAML has JSON in it


def reached(made: World, step: int) -> None:
    """Also ends when the run does, so that a run that failed is not waited for."""

    def look() -> bool:
        shown = made.client.show("cell")
        return bool(shown.step >= step or shown.state == "ended")

    made.until(look, f"step {step}", every=0.1)  # a look costs the daemon more than it says
    shown = made.client.show("cell")
    assert shown.step >= step, shown.detail


def kill_trainer(made: World) -> None:
    """The last rank where the trainer has processes of its own, else the pool that it is a part of."""
    pool = psutil.Process(made.pid("cell", "pool"))
    ranks = [p for p in pool.children(recursive=True) if "lorad.trainers.ranks.worker" in p.cmdline()]
    assert len(ranks) == RANKS[made.client.show("cell").spec["trainer"]["backend"]]
    os.kill(ranks[-1].pid if ranks else pool.pid, signal.SIGKILL)


def learned(made: World, steps: int) -> tuple[float, float]:
    """Mean reward of the first step and of the last three."""
    rewards = [step.metrics["reward"] or 0.0 for step in made.client.steps("cell")]
    assert len(rewards) == steps
    first, last = rewards[0], fmean(rewards[-3:])
    assert last > first + 0.3, rewards
    return first, last


def attested_and_base_untouched(made: World) -> None:
    """Two attempts saw the same base; a driver whose base has changed when it closes its slot does not
    complete.
    """
    versions = made.client.adapters("cell")
    assert {version.attested for version in versions} == {"passed"}
    assert {version.rank for version in versions} == {8}
    attempts = [record.data for record, _ in read(made.home.run("cell").journal) if record.kind == "attempt"]
    assert len(attempts) == 2 and attempts[1]["resumed_from"] is not None
    assert len({attempt["base_checksum"] for attempt in attempts}) == 1


def a_fork_stays_with_its_start(made: World) -> None:
    """A fork begins where its KL reference is, which the same trainer holds and the same engine attests."""
    made.lorad("fork", "cell", "algorithm.kl.coef=0.1", "--fresh", "--steps", 2, "--name", "fork", "--wait")
    first, second = (step.metrics["kl"] or 0.0 for step in made.client.steps("fork"))
    assert abs(first) < 1e-6 < second
    assert made.client.show("fork").warnings == []


def peft_sorts(base: str, checkpoint: Path) -> None:
    """PEFT alone, with transformers' forward pass, solves held-out problems with it."""
    directory = resolve(base)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), checkpoint)
    problems = [problem("sort", "test", 0, position) for position in range(32)]
    assert fmean(completion(model, tokenizer, p.prompt) == p.answer for p in problems) >= 0.6


def completion(model: PeftModel, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def another_trainer_goes_on(made: World, base: str, checkpoint: Path, reward: float) -> None:
    """The builtin pool takes it as `lora.adapter_path`, and begins where the cell ended."""
    begin = ("--lora-adapter-path", checkpoint, "trainer.steps=1", "--name", "heir", "--wait")
    made.lorad("run", made.spec(SPEC), f"model.path={base}", *LORA, *begin)
    assert (made.client.steps("heir")[0].metrics["reward"] or 0.0) > reward - 0.2
