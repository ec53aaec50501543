"""The command line, typed as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.world import SMALL, World, world

LONG = SMALL.replace("steps: 6", "steps: 400")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        yield it


def test_no_daemon_is_exit_code_5() -> None:
    with world() as empty:
        assert "lorad daemon start" in empty.lorad("list", expect=5).stderr


def test_unknown_run_is_exit_code_3(made: World) -> None:
    made.lorad("daemon", "start")
    assert "no run named nobody" in made.lorad("show", "nobody", expect=3).stderr


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("lora.rnak=3", "lora.rank"),
        ("lora.rank=0", "lora.rank"),
        ("lora.rank=-1", "lora.rank"),
        ("lora.rank=many", "lora.rank"),
        ("lora.target_modules=[z_proj]", "q_proj"),
        ("data.train=missing.jsonl", "missing.jsonl"),
        ("reward=missing.py:reward", "missing.py"),
        ("model.path=/nowhere/at/all", "/nowhere/at/all"),
        ("rollout.backend=quantum", "quantum"),
    ],
)
def test_bad_spec_is_exit_code_2_and_starts_nothing(made: World, override: str, told: str) -> None:
    error = made.lorad("run", made.spec(), override, "--name", "bad", expect=2).stderr
    assert told in error
    made.lorad("show", "bad", expect=3)


def test_unknown_key_in_a_file_is_told_with_its_line(made: World) -> None:
    error = made.lorad("run", made.spec("seed: 1\nlora:\n  rnak: 3\n"), expect=2).stderr
    assert "spec.yaml:3" in error and "lora.rank" in error


def test_malformed_data_line_is_told_with_its_number(made: World) -> None:
    (made.root / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    error = made.lorad("run", made.spec(), "data.train=rows.jsonl", expect=2).stderr
    assert "rows.jsonl:2" in error


def test_name_in_use_is_refused(made: World) -> None:
    made.run("taken", "trainer.steps=1")
    assert "taken" in made.lorad("run", made.spec(), "--name", "taken", expect=1).stderr


def test_lora_flags_reach_the_spec(made: World) -> None:
    flags = ("--lora-rank", 4, "--lora-alpha", 8, "--target-modules", "q_proj,v_proj", "--lora-dropout", 0.1)
    made.lorad("run", made.spec(), "trainer.steps=1", "--name", "flags", "--wait", *flags)
    shown = made.lorad("show", "flags").stdout
    assert "spec       lora.rank=4\n" in shown and "spec       trainer.steps=1\n" in shown and "lora.type" not in shown
    lora = made.json("show", "flags")["spec"]["lora"]
    assert (lora["rank"], lora["alpha"], lora["dropout"]) == (4, 8, 0.1)
    version = made.json("adapters", "flags")[-1]
    assert (version["rank"], version["alpha"]) == (4, 8)


def test_a_flag_with_wildcards_is_text(made: World) -> None:
    flags = ("--target-modules", "*_proj", "--exclude-modules", "*.mlp.*, lm_head")
    made.lorad("run", made.spec(), "trainer.steps=1", "--name", "wild", "--wait", *flags)
    lora = made.json("show", "wild")["spec"]["lora"]
    assert (lora["target_modules"], lora["exclude_modules"]) == ("*_proj", "*.mlp.*, lm_head")


def test_run_takes_the_flags_that_users_of_miles_and_vime_know(made: World) -> None:
    told = made.lorad("run", "--help", COLUMNS="160").stdout
    lora = ("rank", "alpha", "dropout", "type", "adapter-path")
    known = ("--trainer", "--rollout", "--target-modules", "--exclude-modules", *(f"--lora-{flag}" for flag in lora))
    assert [flag for flag in known if flag not in told] == []


def test_pause_resume_stop_kill_and_rm(made: World) -> None:
    made.lorad("run", made.spec(LONG), "--name", "moves", "--detach")
    made.reached("moves", 1)
    assert made.json("pause", "moves", "--wait")["state"] == "paused"
    step = made.json("checkpoints", "moves")[-1]["step"]
    assert made.json("show", "moves")["step"] == step
    made.lorad("resume", "moves", "--detach")
    made.reached("moves", step + 1)
    stopped = made.json("stop", "moves", "--wait")
    assert (stopped["state"], stopped["reason"]) == ("ended", "stopped")
    made.lorad("resume", "moves", "--detach")
    made.reached("moves", stopped["step"] + 1)
    killed = made.json("kill", "moves", "--wait")
    assert (killed["state"], killed["reason"]) == ("ended", "killed")
    directory = Path(made.json("show", "moves")["directory"])
    made.lorad("rm", "moves", "--yes")
    made.lorad("show", "moves", expect=3)
    assert not directory.exists()


def test_a_run_that_wants_the_pool_for_itself_waits_and_says_why(made: World) -> None:
    made.lorad("run", made.spec(LONG), "--name", "first", "--detach")
    made.reached("first", 1)
    made.lorad("run", made.spec(), "resources.exclusive=true", "--name", "second", "--detach")
    waiting = made.until(lambda: made.client.show("second")["waiting"], "second says why it waits")
    assert "first" in waiting and made.client.show("second")["state"] == "queued"
    made.lorad("kill", "first", "--wait")
    assert made.over("second")["reason"] == "completed"


def test_interrupt_detaches_and_the_run_goes_on(made: World) -> None:
    made.lorad("daemon", "start")
    process = subprocess.Popen(
        [sys.executable, "-m", "lorad", "run", str(made.spec(LONG)), "--name", "detached"],
        env=os.environ | {"LORAD_HOME": str(made.home.root)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    made.until(lambda: "detached" in {r["name"] for r in made.client.list()}, "the run exists")
    made.reached("detached", 1)
    process.send_signal(signal.SIGINT)
    assert "goes on" in process.communicate(timeout=60)[1]
    assert process.returncode == 0
    made.reached("detached", made.client.show("detached")["step"] + 1)
    made.lorad("kill", "detached", "--wait")


def test_plot_writes_a_picture_and_draws_in_the_terminal(made: World) -> None:
    made.run("plotted", "trainer.steps=3")
    assert "reward" in made.lorad("plot", "plotted").stdout
    made.lorad("plot", "plotted", "--png", made.root / "curve.png")
    assert (made.root / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_logs_samples_pools_devices_doctor_and_init_say_something(made: World) -> None:
    made.run("talker", "trainer.steps=2")
    assert "step 2/2" in made.lorad("logs", "talker").stdout
    assert "S:" in made.lorad("samples", "talker").stdout
    assert "builtin:tiny" in made.lorad("pools").stdout
    assert "cpu" in made.lorad("devices").stdout
    assert "daemon" in made.lorad("doctor").stderr
    made.lorad("init", made.root / "new.yaml")
    made.lorad("run", made.root / "new.yaml", "trainer.steps=1", "eval.every=0", "--name", "inited", "--wait")


def test_completion_scripts_name_the_command(made: World) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "lorad" in made.lorad("completion", shell).stdout


def test_name_of_a_removed_run_can_be_used_again_but_its_version_numbers_not(made: World) -> None:
    made.run("phoenix", "trainer.steps=2")
    made.lorad("rm", "phoenix", "--yes")
    made.run("phoenix", "trainer.steps=1")
    assert [v["version"] for v in made.client.adapters("phoenix")] == [3, 4]
