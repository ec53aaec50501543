"""The command line, typed as a user would."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.client.overrides import changed
from tests.kit.pty_kit import Terminal
from tests.kit.world import SMALL, World, world

# Slow, and little to do: it goes on beside what is typed.
LONG = SMALL.replace("steps: 6", "steps: 400") + "reward: {name: 'slow.py:score', workers: 1}\n"
SLOW = "import time\ndef score(completion):\n    time.sleep(0.02)\n    return "
SLOW += "sum(map(ord, completion)) % 5 / 5\n"  # groups differ: there is no alarm


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        (it.root / "slow.py").write_text(SLOW)
        yield it


def test_no_daemon_is_exit_code_5() -> None:
    with world() as empty:
        assert "lorad daemon start" in empty.lorad("list", expect=5).stderr


def test_unknown_run_is_exit_code_3(made: World) -> None:
    made.lorad("daemon", "start")
    assert "no run named nobody" in made.lorad("show", "nobody", expect=3).stderr


@pytest.mark.parametrize(
    ("override", "told"),
    [("lora.rnak=3", "lora.rank"), ("data.train=missing.jsonl", "missing.jsonl")],
)
def test_bad_spec_exits_with_2_and_starts_nothing(made: World, override: str, told: str) -> None:
    error = made.lorad("run", made.spec(), override, "--name", "bad", expect=2).stderr
    assert told in error
    made.lorad("show", "bad", expect=3)


def test_unknown_key_in_a_file_names_its_line(made: World) -> None:
    error = made.lorad("run", made.spec("seed: 1\nlora:\n  rnak: 3\n"), expect=2).stderr
    assert "spec.yaml:3" in error and "lora.rank" in error


def test_malformed_data_line_is_named_by_number(made: World) -> None:
    (made.root / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    error = made.lorad("run", made.spec(), "data.train=rows.jsonl", expect=2).stderr
    assert "rows.jsonl:2" in error


@pytest.mark.system
def test_a_prompt_with_an_answer_is_shown(made: World) -> None:
    chat = '[{"role": "user", "content": "S:21="}, {"role": "assistant", "content": "It is 12"}]'
    (made.root / "rows.jsonl").write_text(f'{{"prompt": {chat}, "answer": "12"}}\n')
    for verb, more in (("check", ()), ("run", ("--name", "answered", "-d"))):
        more = ("data.train=rows.jsonl", "trainer.steps=100000", *more)
        error = made.lorad(verb, made.spec(), *more).stderr
        assert (
            "warning: data.train: row 1 (“It is 12”): the prompt ends with a turn of the assistant's" in error
        )
    made.lorad("stop", "answered")


def test_lora_flags_reach_the_spec(made: World) -> None:
    flags = ("--lora-rank", 4, "--lora-alpha", 8, "--target-modules", "q_proj,v_proj", "--lora-dropout", 0.1)
    tags = ("tags=[draft, good]", "--tag", "good", "--tag", "paper-2")
    made.lorad("run", made.spec(), "trainer.steps=1", "--name", "flags", "--wait", *flags, *tags)
    assert made.lorad("tag", "flags").stdout.split() == ["draft", "good", "paper-2"]
    shown = made.lorad("show", "flags").stdout
    assert (
        "spec       lora.rank=4\n" in shown
        and "spec       trainer.steps=1\n" in shown
        and "lora.type" not in shown
    )
    lora = made.json("show", "flags")["spec"]["lora"]
    assert (lora["rank"], lora["alpha"], lora["dropout"]) == (4, 8, 0.1)
    version = made.json("adapters", "flags")[-1]
    assert (version["rank"], version["alpha"]) == (4, 8)


@pytest.mark.system
def test_repeated_module_flags_add_up(made: World) -> None:
    flags = (
        "--target-modules",
        "*_proj",
        "--target-modules",
        "q_proj",
        "--exclude-modules",
        "*.mlp.*, lm_head",
    )
    made.lorad("run", made.spec(LONG), "--name", "wild", "--detach", *flags)
    lora = made.json("show", "wild")["spec"]["lora"]
    made.lorad("kill", "wild")
    assert (lora["target_modules"], lora["exclude_modules"]) == ("*_proj,q_proj", "*.mlp.*, lm_head")


def test_run_takes_the_flags_of_miles_and_vime(made: World) -> None:
    told = made.lorad("run", "--help", COLUMNS="160").stdout
    lora = ("rank", "alpha", "dropout", "type", "adapter-path")
    known = (
        "--trainer",
        "--rollout",
        "--target-modules",
        "--exclude-modules",
        *(f"--lora-{flag}" for flag in lora),
    )
    assert [flag for flag in known if flag not in told] == []


@pytest.mark.system
def test_pause_resume_stop_kill_and_rm(made: World) -> None:
    made.lorad("run", made.spec(LONG), "--name", "moves", "--detach")
    made.reached("moves", 1)
    assert "moves is pausing: it finishes its step" in made.lorad("pause", "moves").stderr
    assert made.over("moves").state == "paused"
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


@pytest.mark.system
def test_exclusive_run_waits_and_says_why(made: World) -> None:
    made.lorad("run", made.spec(LONG), "--name", "first", "--detach")
    made.reached("first", 1)
    alone = ("trainer.steps=1", "resources.exclusive=true")
    made.lorad("run", made.spec(), *alone, "--name", "second", "--detach")
    waiting = made.until(lambda: made.client.show("second").waiting, "second says why it waits")
    assert "first" in waiting and made.client.show("second").state == "queued"
    made.lorad("kill", "first", "--wait")
    made.completed("second")


@pytest.mark.system
def test_interrupt_only_detaches_from_the_run(made: World) -> None:
    made.lorad("daemon", "start")
    process = subprocess.Popen(
        [sys.executable, "-m", "lorad", "run", str(made.spec(LONG)), "--name", "detached"],
        env=os.environ | {"LORAD_HOME": str(made.home.root)},
        stderr=subprocess.PIPE,
        text=True,
        # a background job ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    made.until(lambda: "detached" in {r.name for r in made.client.list()}, "the run exists")
    made.reached("detached", 1)
    process.send_signal(signal.SIGINT)
    assert "continues" in process.communicate(timeout=60)[1]
    assert process.returncode == 0
    made.reached("detached", made.client.show("detached").step + 1)
    made.lorad("kill", "detached", "--wait")


@pytest.mark.system
def test_live_line_fits_the_terminal_and_detaches_cleanly(made: World) -> None:
    environment = os.environ | {"LORAD_HOME": str(made.home.root), "TERM": "xterm"}
    command = [
        sys.executable,
        "-m",
        "lorad",
        "run",
        str(made.spec(LONG)),
        "--name",
        "watched-by-a-narrow-terminal",
        "-q",
    ]
    terminal = Terminal(command, 80, environment)
    seen = terminal.until("watched-by-a-narrow-terminal running", "reward", "ETA")
    terminal.type("\x03")
    rest, code = terminal.end()
    drawn = re.findall(r"\x1b\[2K([^\r\x1b]*)", seen + rest)
    assert drawn and all(len(line) <= 80 for line in drawn) and code == 0 and "(answer" not in seen
    assert rest.rpartition("\x1b[1A\x1b[2K\r")[2].startswith("Detached; ") and rest.count("\n") == 2
    made.lorad("kill", "watched-by-a-narrow-terminal", "--wait")


def test_what_contradicts_itself_is_refused_before_anything_starts() -> None:
    with world() as empty:
        refused = (
            ("sweep", empty.spec(), "-d", "--wait"), ("tui",), ("plot", "a", "-o", "a.jpg"),
        )  # fmt: skip
        told = [empty.lorad(*arguments, expect=2).stderr for arguments in refused]
        assert "--wait" in told[0] and "needs a terminal" in told[1] and "Name it curves.png" in told[-1]
        assert not empty.home.root.exists()


@pytest.mark.system
def test_typed_paths_are_relative_to_the_shell(made: World) -> None:
    rows = '{"prompt": "S:21=", "answer": "12"}\n' * 4
    (made.root / "mine.jsonl").write_text(rows)
    (made.root / "grade.py").write_text("def score(completion):\n    return 1.0\n")
    (made.root / "specs").mkdir()
    spec = made.spec(name="specs/spec.yaml")
    typed = ("data.train=mine.jsonl", "reward=grade.py:score", "trainer.steps=1")
    made.lorad("run", spec, *typed, "--name", "Typed-Here", "--wait")
    shown = made.json("show", "Typed-Here")["spec"]
    assert (shown["data"]["train"], shown["reward"]) == (
        f"{made.root}/mine.jsonl",
        f"{made.root}/grade.py:score",
    )
    told = made.lorad(
        "run", spec, "lora.adapter_path=none", "data.train=no.jsonl", "reward=no.py:x", expect=2
    ).stderr
    assert all(f"{made.root}/{name}" in told for name in ("none", "no.jsonl", "no.py"))


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("data.train=a.jsonl", 'data.train="{here}/a.jsonl"'),
        ("data.train=../a.jsonl,b.parquet", 'data.train="{up}/a.jsonl","{here}/b.parquet"'),
        ("data.eval=sort", "data.eval=sort"),
        ("data.train=openai/gsm8k:train", "data.train=openai/gsm8k:train"),
        ("reward=my dir/grade.py:score", 'reward="{here}/my dir/grade.py:score"'),
        ("reward=exact_match", "reward=exact_match"),
        ("model.path=Qwen/Qwen3-8B", "model.path=Qwen/Qwen3-8B"),
        ("model.path=./Qwen", 'model.path="{here}/Qwen"'),
        ("model.path=builtin:tiny", "model.path=builtin:tiny"),
        ('lora.adapter_path="start"', 'lora.adapter_path="{here}/start"'),
        ("algorithm.kl.reference=./start", 'algorithm.kl.reference="{here}/start"'),
        ("algorithm.kl.reference=start", "algorithm.kl.reference=start"),
        ("algorithm.kl.reference=a@12", "algorithm.kl.reference=a@12"),
        ("lora.adapter_path=~/start", "lora.adapter_path=~/start"),
        ("lora.adapter_path=", "lora.adapter_path="),
        ("trainer.lr=3e-4", "trainer.lr=3e-4"),
        ("nonsense", "nonsense"),
    ],
)
def test_path_in_an_override_is_made_absolute(typed: str, sent: str, tmp_path: Path) -> None:
    assert changed(typed, tmp_path) == sent.replace("{here}", str(tmp_path)).replace(
        "{up}", str(tmp_path.parent)
    )


@pytest.mark.system
def test_names_that_differ_in_capitals_alone_are_refused(made: World) -> None:
    made.run("Capital", "trainer.steps=1")
    assert "Capital" in made.lorad("run", made.spec(), "--name", "Capital", expect=1).stderr
    assert "capitals alone" in made.lorad("run", made.spec(), "--name", "capital", expect=1).stderr
    assert made.json("adapters", "Capital")[-1]["run"] == "Capital"
    assert made.lorad("generate", "Capital@1", "S:21=").stdout
    assert (
        "is no longer pinned" in [made.lorad("pin", "Capital@1"), made.lorad("unpin", "Capital@1")][1].stderr
    )


def test_a_mistyped_command_comes_with_the_nearest(made: World) -> None:
    assert "Did you mean show?" in made.lorad("sho", expect=2).stderr
    assert "lorad --help" in made.lorad("xyzzy", expect=2).stderr


def test_reports_are_on_stdout(made: World) -> None:
    assert "The daemon (pid" in made.lorad("daemon", "start").stdout
    assert "The daemon (pid" in made.lorad("daemon", "status").stdout
    assert made.lorad("doctor").stderr == ""


@pytest.mark.system
def test_logs_samples_pools_devices_and_doctor_print(made: World) -> None:
    made.run("talker", "trainer.steps=2")
    assert "reward" in made.lorad("plot", "talker").stdout
    made.lorad("plot", "talker", "--out", made.root / "curve.png")
    assert (made.root / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "step 2/2" in made.lorad("logs", "talker").stdout
    assert "S:" in made.lorad("samples", "talker").stdout
    assert ["version", "@1"] in [
        line.split() for line in made.lorad("samples", "talker", "--sample", "1").stdout.splitlines()
    ]
    assert "builtin:tiny" in made.lorad("pools").stdout
    assert "cpu" in made.lorad("devices").stdout
    assert "daemon" in made.lorad("doctor").stdout
    made.lorad("init", made.root / "new.yaml")
    made.lorad("run", made.root / "new.yaml", "trainer.steps=1", "eval.every=0", "--name", "inited", "--wait")


@pytest.mark.system
def test_reused_name_continues_the_version_numbers(made: World) -> None:
    made.run("phoenix", "trainer.steps=2")
    made.lorad("rm", "phoenix", "--yes")
    made.run("phoenix", "trainer.steps=1")
    assert [v.version for v in made.client.adapters("phoenix")] == [3, 4]
