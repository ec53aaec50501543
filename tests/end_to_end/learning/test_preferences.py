"""Runs that train on preferences, and what their logs, alarms and resumes say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.rl.tasks import problem
from lorad.text import number
from tests.kit.world import World, world

pytestmark = pytest.mark.system

DPO = """
seed: 3
algorithm: dpo
data: {train: pairs.jsonl, eval: sort, prompts_per_step: 8}
trainer: {lr: 5.0e-4, steps: 12, schedule: cosine, warmup_steps: 2}
rollout: {max_new_tokens: 12}
eval: {every: 6, problems: 16}
checkpoint: {every: 3, keep: 0}
"""
SECTOR = 512 // 4  # numbers that a disk writes as a whole
ROWS = 40  # fewer than the steps see, so that a second epoch begins


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        found = [problem("sort", "train", 0, n) for n in range(ROWS)]
        pairs = [{"prompt": p.prompt, "chosen": p.answer, "rejected": p.prompt[2:-1] + "0"} for p in found]
        write(it.root / "pairs.jsonl", pairs)
        labels = [
            {"prompt": p["prompt"], "completion": p[key], "label": key == "chosen"}
            for p in pairs
            for key in ("chosen", "rejected")
        ]
        write(it.root / "labels.jsonl", labels)
        it.run("calm", text=DPO)
        yield it


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def last(made: World, run: str, key: str) -> float:
    value = made.client.steps(run)[-1].metrics[key]
    assert value is not None
    return value


def kept(made: World, run: str) -> np.ndarray:
    (path,) = made.home.run(run).reference_logprobs.iterdir()
    return np.fromfile(path, "<f4")


@pytest.mark.long  # the power cut kills the driver, too
@pytest.mark.parametrize("victim", ["driver", "pool"])
def test_killed_and_resumed_equals_undisturbed(made: World, victim: str) -> None:
    name = f"killed-{victim}"
    made.lorad("run", made.spec(DPO), "--name", name, "--detach")
    made.strike(name, victim, 4)
    assert made.over(name).reason == "lost"
    made.lorad("resume", name, "--wait")
    assert made.facts(name) == made.facts("calm")
    assert kept(made, name).tobytes() == kept(made, "calm").tobytes()


def test_a_power_cut_loses_no_reference(made: World) -> None:
    made.lorad("run", made.spec(DPO), "--name", "dark", "--detach")
    made.strike("dark", "driver", 4)
    assert made.over("dark").reason == "lost"
    values = kept(made, "dark")
    for sector in range(0, values.size, 2 * SECTOR):  # what was not written back is as it was before
        values[sector : sector + SECTOR] = np.nan
    assert np.isfinite(values).any()
    (path,) = made.home.run("dark").reference_logprobs.iterdir()
    values.tofile(path)
    made.lorad("resume", "dark", "--from", 3, "--wait")  # from there on every row comes again
    assert made.facts("dark") == made.facts("calm")
    assert kept(made, "dark").tobytes() == kept(made, "calm").tobytes()


def test_each_row_has_its_reference_once(made: World) -> None:
    assert np.isfinite(kept(made, "calm")).all()


def test_a_resume_reads_the_reference_it_kept(made: World) -> None:
    made.run("read-again", "trainer.steps=6", text=DPO.replace("cosine", "constant"))
    (path,) = made.home.run("read-again").reference_logprobs.iterdir()
    np.full(path.stat().st_size // 4, -50.0, "<f4").tofile(path)
    made.lorad("resume", "read-again", "--steps", 7, "--wait")
    assert last(made, "read-again", "chosen_shift") > 10


def test_pairs_are_told_apart(made: World) -> None:
    assert last(made, "calm", "pair_accuracy") > 0.9 and last(made, "calm", "reward_margin") > 0
    assert last(made, "calm", "chosen_shift") > last(made, "calm", "rejected_shift")
    assert made.client.steps("calm")[0].metrics["reward_margin"] == 0
    reward, margin = last(made, "calm", "chosen_reward"), last(made, "calm", "reward_margin")
    assert reward - last(made, "calm", "rejected_reward") == margin
    assert f"margin {number(margin, 4)}" in made.lorad("logs", "calm").stdout
    assert "loss sigmoid, beta 0.1" in made.lorad("show", "calm").stdout


def test_held_out_pairs_are_evaluated(made: World) -> None:
    made.run("judged", "data.eval=pairs.jsonl", text=DPO)
    first, *_, end = made.client.evals("judged")
    assert first.nll is not None and end.nll is not None and end.nll < first.nll
    assert first.accuracy is None and end.accuracy is not None and end.accuracy > 0.8
    assert "of pairs right" in made.lorad("show", "judged").stdout


@pytest.mark.parametrize("loss", ["ipo", "simpo", "kto", "apo_zero"])
def test_every_loss_learns(made: World, loss: str) -> None:
    data = "labels" if loss == "kto" else "pairs"
    of_loss = (f"algorithm.preference.loss={loss}", f"data.train={data}.jsonl")
    made.run(loss, *of_loss, "trainer.steps=4", "eval.every=0", text=DPO)
    steps = made.client.steps(loss)
    first, end = steps[0].metrics["loss"], steps[-1].metrics["loss"]
    assert first is not None and end is not None and end < first
    assert made.home.run(loss).reference_logprobs.exists() == (loss != "simpo")


def test_labels_train_alike_in_every_file(made: World) -> None:
    rows = [json.loads(line) for line in (made.root / "labels.jsonl").read_text().splitlines()]
    write(made.root / "inside.jsonl", [row | {"label": None, "by": {"me": row["label"]}} for row in rows])
    lines = [f"{row['prompt']},{row['completion']},{row['label']}\n" for row in rows]
    (made.root / "labels.csv").write_text("prompt,completion,label\n" + "".join(lines))
    losses = []
    for name, key in (("labels.jsonl", "label"), ("labels.csv", "label"), ("inside.jsonl", "by.me")):
        run, more = f"of-{name}".replace(".", "-"), (f"data.train={name}", f"data.label_key={key}")
        made.run(run, "algorithm.preference.loss=kto", "trainer.steps=3", "eval.every=0", *more, text=DPO)
        losses.append([step.metrics["loss"] for step in made.client.steps(run)])
    assert losses[0] == losses[1] == losses[2]


def test_the_reference_is_what_a_fork_begins_with(made: World) -> None:
    made.run("tuned", "algorithm=sft", "data.train=sort", "trainer.steps=3", "eval.every=0", text=DPO)
    made.lorad("fork", "tuned", "algorithm=dpo", "data.train=pairs.jsonl", "--name", "after", "--wait")
    shown = made.client.show("after")
    assert shown.reference is not None and shown.reference.name == "start"
    first = made.client.steps("after")[0].metrics
    assert abs(first["reward_margin"] or 0.0) < 1e-4 and abs(first["chosen_shift"] or 0.0) < 1e-5
