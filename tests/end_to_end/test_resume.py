"""N steps, a stop or a kill, a resume and M steps are N + M steps: bit for bit on the CPU."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.models.directory import BUILTIN, resolve
from tests.kit.warm.processes import CLIENT as WARM
from tests.kit.world import COLD, World, world

pytestmark = pytest.mark.system

SPEC = """
seed: 3
lora: {rank: 8, alpha: 16, dropout: 0.1}
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 4}
trainer: {lr: 2.0e-3, steps: 8, schedule: cosine, warmup_steps: 2}
rollout: {max_new_tokens: 12}
eval: {every: 4, problems: 4}
checkpoint: {every: 2, keep: 2}
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
    made.reached("paused", 2)
    made.client.pause("paused")
    assert made.over("paused").state == "paused"
    made.lorad("resume", "paused", "--wait")
    assert made.facts("paused") == expected


@pytest.mark.parametrize("victim", ["driver", "pool"])
def test_killed_and_resumed_equals_undisturbed(
    undisturbed: tuple[World, dict[str, Any]], victim: str
) -> None:
    made, expected = undisturbed
    name = f"killed-{victim}"
    start(made, name)
    made.strike(name, victim, 3)
    over = made.over(name)
    assert over.state == "ended" and over.reason == "lost"
    made.lorad("resume", name, "--wait")
    assert made.facts(name) == expected
    first, second = made.client.show(name).attempts
    assert first.resumed_from is None and (second.resumed_from or 1) % 2 == 0


def test_dora_resumes_and_its_versions_are_attested(undisturbed: tuple[World, dict[str, Any]]) -> None:
    made, _ = undisturbed
    text = SPEC.replace("dropout: 0.1", "dora: true").replace("steps: 8", "steps: 3, schedule_steps: 8")
    made.run("dora", text=text)
    made.run("dora-half", "trainer.steps=2", text=text)
    made.lorad("resume", "dora-half", "trainer.steps=3", "--wait")
    whole, halves = made.client.adapters("dora"), made.client.adapters("dora-half")
    assert whole[-1].sha256 == halves[-1].sha256 != whole[0].sha256
    assert {version.attested for version in whole} == {"passed"}
    made.lorad("fork", "dora@3", "--name", "dora-fork", "trainer.steps=1")
    assert made.client.adapters("dora-fork")[0].sha256 == whole[-1].sha256
    made.lorad("export", "dora@3", str(made.root / "merged"), "--merge")
    assert (made.root / "merged" / "model.safetensors").is_file()


def test_training_never_notices_a_killed_daemon(undisturbed: tuple[World, dict[str, Any]]) -> None:
    made, expected = undisturbed
    daemon = made.json("daemon", "status")["pid"]
    start(made, "orphan")
    made.pid("orphan", "driver")
    os.kill(daemon, signal.SIGKILL)
    made.lorad("daemon", "status", expect=5)
    made.lorad("list")
    made.completed("orphan")
    attempts = made.client.show("orphan").attempts
    assert [a.attempt for a in attempts] == [1]
    assert made.facts("orphan") == expected


def test_resume_with_more_steps_never_rewinds_numbers(
    undisturbed: tuple[World, dict[str, Any]],
) -> None:
    made, _ = undisturbed
    made.run("more", "trainer.steps=3", text=SPEC)
    refused = made.lorad("resume", "more", "--steps", "5", expect=2).stderr
    assert "cosine ended at step 3" in refused and "trainer.schedule_steps=5" in refused
    told = made.lorad("resume", "more", "trainer.min_lr=1e-4", "--steps", "5", "--wait").stderr
    assert "warning: trainer.schedule_steps: cosine ends at step 3" in told
    assert [s.step for s in made.client.steps("more")] == [1, 2, 3, 4, 5]
    assert [s.metrics["lr"] for s in made.client.steps("more")][-2:] == [1e-4, 1e-4]
    assert [v.version for v in made.client.adapters("more")] == [0, 1, 2, 3, 4, 5, 6]


def test_slot_of_a_killed_driver_is_given_back(undisturbed: tuple[World, dict[str, Any]]) -> None:
    made, _ = undisturbed
    made.lorad("run", made.spec(SPEC), "trainer.steps=1000", "--name", "leaver", "--detach")
    made.reached("leaver", 1)
    made.lorad("kill", "leaver", "--wait")
    made.until(lambda: made.client.pools()[0].tenants == [], "the pool has no tenant")


def test_resume_keeps_threads_and_every_bit() -> None:
    with world() as made:
        made.home.root.mkdir()
        made.home.config.write_text("runtime: {threads: 2}")
        made.run("calm", "trainer.steps=6", text=SPEC)
        made.lorad("run", made.spec(SPEC), "trainer.steps=6", "--name", "moved", "--detach")
        made.strike("moved", "driver", 2)
        assert made.over("moved").reason == "lost"
        made.home.config.write_text("runtime: {threads: 1}")
        made.lorad("daemon", "stop", "--pools")
        made.lorad("resume", "moved", "--wait")
        assert [pool.threads for pool in made.client.pools()] == [2]
        assert made.facts("moved") == made.facts("calm")


@pytest.mark.long  # as after a change of the CPU
def test_resume_says_that_products_have_other_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAD_CACHE", str(tmp_path))
    with world() as made:
        made.run("moved", "trainer.steps=1", text=SPEC)
        told = made.lorad("resume", "moved", "--steps", "2", "trainer.min_lr=1e-4", "--wait").stderr
        assert "warning: trainer.schedule_steps" in told and "other forms" not in told
        made.lorad("daemon", "stop", "--pools")
        shutil.rmtree(tmp_path / "products")
        made.lorad("resume", "moved", "--steps", "3", "trainer.min_lr=1e-4", "--wait")
        told = made.lorad("logs", "moved").stdout
        assert told.count("warning: products are computed in other forms than in the attempt before") == 1


def test_a_run_resumes_on_another_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made before is kept; what comes is attested, and said to differ in rounding."""
    monkeypatch.setenv("LORAD_CACHE", str(tmp_path))
    with world(COLD) as made:
        spec = made.spec(SPEC)
        command = ("run", spec, "trainer.steps=1", "--name", "moved", "--wait")
        made.lorad(*command, ATEN_CPU_CAPABILITY="default", MKL_ENABLE_INSTRUCTIONS="SSE4_2")
        before = made.client.adapters("moved")
        made.lorad("daemon", "stop", "--pools")
        made.python = WARM  # whose products are those of this CPU
        made.lorad("resume", "moved", "--steps", "2", "trainer.min_lr=1e-4", "--wait")
        log = made.lorad("logs", "moved").stdout
        assert log.count("products are computed in other forms than in the attempt before") == 1
        made.lorad("resume", "moved", "--steps", "3", "trainer.min_lr=1e-4", "--wait")
        assert "products are computed in other forms" not in made.lorad("logs", "moved").stdout
        versions = made.client.adapters("moved")
        assert [version.sha256 for version in versions[: len(before)]] == [v.sha256 for v in before]
        assert {version.attested for version in versions} == {"passed"}
        assert [step.step for step in made.client.steps("moved")] == [1, 2, 3]


CHATS = """
model: {path: model}
algorithm: {group_size: 2}
data: {train: rows.jsonl, eval: rows.jsonl, prompts_per_step: 2, system: "S:",
       chat_template_kwargs: {end: "="}}
trainer: {steps: 2}
rollout: {max_new_tokens: 12, stop: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]}
eval: {every: 2, problems: 2}
checkpoint: {every: 1}
"""
CLOCK = "{{ strftime_now('%H%M%S%f') }}{{ messages[0].content }}{{ messages[1].content }}{{ end }}"


def test_resume_keeps_the_date_of_chat_templates(
    undisturbed: tuple[World, dict[str, Any]],
) -> None:
    """Its prompts have the date of the first attempt, and rewards see no stop string."""
    made, _ = undisturbed
    shutil.copytree(resolve("builtin:tiny"), made.root / "model")
    (made.root / "model" / "chat_template.jinja").write_text(CLOCK)
    rows = [json.dumps({"prompt": digits, "answer": ""}) for digits in ("4821", "73")]
    (made.root / "rows.jsonl").write_text("\n".join(rows))
    made.run("dated", text=CHATS)
    made.lorad("resume", "dated", "--steps", "4", "--wait")
    samples = [sample for step in (1, 4) for sample in made.client.samples("dated", step=step)]
    assert len({sample.prompt for sample in samples}) == 2  # the time of each is that of the other attempt
    assert all(sample.prompt.endswith(("S:4821=", "S:73=")) for sample in samples)
    stopped = [sample for sample in samples if sample.finish == "stop"]
    assert not any(set("0123456789") & set(sample.completion) for sample in stopped)
    assert {sample.reward for sample in stopped if not sample.completion} == {1.0}


def test_resume_warns_of_changed_inputs() -> None:
    """Each attempt keeps the reward file that it ran with."""
    with world() as made:
        model, reward, rows = made.root / "model", made.root / "my.py", made.root / "rows.jsonl"
        shutil.copytree(BUILTIN["builtin:tiny"], model)
        reward.write_text("def score(completion): return len(completion)")
        rows.write_text("".join(json.dumps({"prompt": f"S:{n}=", "answer": "1"}) + "\n" for n in range(8)))
        keys = (f"model.path={model}", f"reward={reward}:score", f"data.train={rows}", "trainer.steps=1")
        made.lorad("run", made.spec(), *keys, "--name", "a", "--wait")
        assert "warning" not in made.lorad("resume", "a", "--steps", "2", "--wait").stderr
        reward.write_text("def score(completion): return 1.0")
        rows.write_text(rows.read_text() + json.dumps({"prompt": "S:9=", "answer": "1"}))
        (model / "generation_config.json").write_text("{}")
        told = made.lorad("resume", "a", "--steps", "3", "--wait").stderr
        assert f"warning: reward: {reward} is not what it was in the attempt before" in told
        assert f"warning: data.train: {rows} is not what it was in the attempt before" in told
        assert "warning: model: generation_config.json" in told
        shown = made.lorad("show", "a").stdout
        assert "my.py is not what it was" in shown and "rows.jsonl is not what it was" in shown
        kept = [made.home.run("a").attempt(number).work / "reward.py" for number in (2, 3)]
        assert "len(completion)" in kept[0].read_text() and "return 1.0" in kept[1].read_text()
