"""N steps, a stop or a kill, a resume and M steps are N + M steps: bit for bit on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.world import World, world

SPEC = """
seed: 3
lora: {rank: 8, alpha: 16, dropout: 0.1}
algorithm: {group_size: 4, minibatches: 2}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 2.0e-3, steps: 60, schedule: cosine, warmup_steps: 2}
rollout: {max_new_tokens: 12}
eval: {every: 15, problems: 16}
checkpoint: {every: 3, keep: 2}
"""


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[tuple[World, dict[str, Any]]]:
    with world() as made:
        made.run("calm", text=SPEC)
        yield made, made.facts("calm")


def start(made: World, name: str) -> None:
    made.lorad("run", made.spec(SPEC), "--name", name, "--detach")


def test_paused_and_resumed_equals_undisturbed(undisturbed: tuple[World, dict[str, Any]]) -> None:
    made, expected = undisturbed
    start(made, "paused")
    made.reached("paused", 4)
    made.lorad("pause", "paused", "--wait")
    made.lorad("resume", "paused", "--wait")
    assert made.facts("paused") == expected


@pytest.mark.parametrize("victim", ["driver", "pool"])
def test_killed_and_resumed_equals_undisturbed(undisturbed: tuple[World, dict[str, Any]], victim: str) -> None:
    made, expected = undisturbed
    name = f"killed-{victim}"
    start(made, name)
    made.reached(name, 4)
    os.kill(made.pid(name, victim), signal.SIGKILL)
    over = made.over(name)
    assert over["state"] == "ended" and over["reason"] == "lost"
    made.lorad("resume", name, "--wait")
    assert made.facts(name) == expected
    first, second = made.client.show(name)["attempts"]
    assert first["resumed_from"] is None and second["resumed_from"] % 3 == 0


def test_training_never_notices_a_killed_daemon(undisturbed: tuple[World, dict[str, Any]]) -> None:
    made, expected = undisturbed
    start(made, "orphan")
    made.pid("orphan", "driver")
    os.kill(made.json("daemon", "status")["pid"], signal.SIGKILL)
    made.lorad("list", expect=5)
    made.lorad("daemon", "start")
    assert made.over("orphan")["reason"] == "completed"
    attempts = made.client.show("orphan")["attempts"]
    assert [a["attempt"] for a in attempts] == [1]
    assert made.facts("orphan") == expected


def test_resume_with_more_steps_goes_on_and_numbers_never_rewind(undisturbed: tuple[World, dict[str, Any]]) -> None:
    made, _ = undisturbed
    made.run("more", "trainer.steps=3", text=SPEC)
    refused = made.lorad("resume", "more", "--steps", "5", expect=2).stderr
    assert "cosine ended at step 3" in refused and "trainer.schedule_steps=5" in refused
    told = made.lorad("resume", "more", "trainer.min_lr=1e-4", "--steps", "5", "--wait").stderr
    assert "warning: trainer.schedule_steps: cosine ends at step 3" in told
    assert [s["step"] for s in made.client.steps("more")] == [1, 2, 3, 4, 5]
    assert [s["metrics"]["lr"] for s in made.client.steps("more")][-2:] == [1e-4, 1e-4]
    assert [v["version"] for v in made.client.adapters("more")] == [0, 1, 2, 3, 4, 5, 6]


def test_damaged_checkpoint_is_refused_and_the_one_before_is_offered(
    undisturbed: tuple[World, dict[str, Any]],
) -> None:
    made, _ = undisturbed
    made.run("damaged", "trainer.steps=6", text=SPEC)
    newest = Path(made.client.checkpoints("damaged")[-1]["path"])
    flip_a_byte(newest / "optimizer.safetensors")
    error = made.lorad("resume", "damaged", "--steps", "8", expect=1).stderr
    assert "optimizer.safetensors" in error and "--from 3" in error
    made.lorad("resume", "damaged", "--from", "3", "--steps", "8", "--wait")
    assert made.client.show("damaged")["step"] == 8


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_slot_of_a_killed_driver_is_given_back(undisturbed: tuple[World, dict[str, Any]]) -> None:
    made, _ = undisturbed
    start(made, "leaver")
    made.reached("leaver", 1)
    made.lorad("kill", "leaver", "--wait")
    made.until(lambda: made.client.pools()[0]["tenants"] == [], "the pool has no tenant")


def test_resume_where_other_threads_would_be_chosen_is_bit_for_bit_the_same() -> None:
    with world() as made:
        made.home.root.mkdir()
        made.home.config.write_text("runtime: {threads: 2}")
        made.run("calm", "trainer.steps=16", text=SPEC)
        made.lorad("run", made.spec(SPEC), "trainer.steps=16", "--name", "moved", "--detach")
        made.reached("moved", 4)
        os.kill(made.pid("moved", "driver"), signal.SIGKILL)
        assert made.over("moved")["reason"] == "lost"
        made.home.config.write_text("runtime: {threads: 1}")
        made.lorad("daemon", "stop")
        made.run("other", "trainer.steps=3", text=SPEC)
        assert [pool["threads"] for pool in made.client.pools()] == [1]
        made.lorad("resume", "moved", "--wait")
        assert [pool["threads"] for pool in made.client.pools()] == [2]
        assert made.facts("moved") == made.facts("calm")
