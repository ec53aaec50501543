"""Commands and flags of other tools."""

import subprocess
import sys
from pathlib import Path

import pytest

from lorad.cli import app as cli
from lorad.errors import SpecError


def run(*words: str) -> None:
    cli.app(words, standalone_mode=False)


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--lr", "trainer.lr"),
        ("--learning-rate", "trainer.lr"),
        ("--num-generations", "algorithm.group_size"),
        ("--model", "model.path"),
    ],
)
def test_a_flag_that_is_a_key_is_told(flag: str, key: str) -> None:
    with pytest.raises(SpecError, match=f"lorad run has no option {flag}") as refused:
        run("run", "spec.yaml", flag, "1")
    assert f"write {key}=VALUE behind" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["eval", "r1", "--lr", "1"], "`lorad eval --help` lists its options."),
        (["daemon", "start", "--foo"], "`lorad daemon start --help` lists its options."),
        (["run", "spec.yaml", "--detahc"], "Did you mean --detach or --tag?"),
        (["list", "--host", "all"], "It stands in front: `lorad --host … list`."),
    ],
)
def test_an_unknown_flag_of_any_verb_is_answered(words: list[str], hint: str) -> None:
    with pytest.raises(SpecError, match="has no option --") as refused:
        run(*words)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--foo"], "lorad has no option --foo"),
        (["--json", "list"], "lorad has no option --json"),
        (["show"], "lorad show: missing argument 'RUN'"),
        (["list", "--limit", "x"], "lorad list: invalid value for '--limit' / '-n': 'x' is not a valid int"),
        (["show", "a", "b"], "lorad show: got unexpected extra argument"),
        (["daemon", "foo"], "lorad daemon: no such command 'foo'"),
        (["run", "--name"], "--name has no value"),
    ],
)
def test_wrong_usage_is_one_plain_sentence(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lorad", *words])
    monkeypatch.setattr(cli, "hook_transport", lambda _: None)  # it outlives the command
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"error: {told}") and len(said) == 2


@pytest.mark.parametrize(
    ("verb", "hint"),
    [
        ("cancel", "Did you mean stop or kill?"),
        ("gpus", "Did you mean devices?"),
        ("merge", "Did you mean export --merge?"),
        ("runs", "Did you mean list?"),
        ("sweeps", "Did you mean sweep --list?"),
        ("version", "Did you mean --version?"),
        ("lsit", "Did you mean list?"),
    ],
)
def test_a_verb_of_others_is_answered_with_ours(verb: str, hint: str) -> None:
    with pytest.raises(SpecError) as refused:
        run(verb)
    assert refused.value.hint == hint


@pytest.mark.parametrize(("alias", "verb"), [("ps", "list"), ("status", "top"), ("compare", "diff")])
def test_aliases_are_the_commands_themselves(
    alias: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(alias, "--help")
    assert f" {verb} " in capsys.readouterr().out


def test_every_hint_names_commands() -> None:
    names = {name.split()[0] for names in cli._MEANT.values() for name in names} | {*cli._ALIASES.values()}
    assert names <= {*cli._COMMANDS, "--version"}
    assert not {*cli._MEANT, *cli._ALIASES} & {*cli._COMMANDS}


def test_help_names_each_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    lines = capsys.readouterr().out.splitlines()
    named = [line.split()[1] for line in lines if line.startswith("│ ") and line[2] not in " -"]
    panels = [line.split("─")[1].strip() for line in lines if line.startswith("╭")]
    assert named == [*cli._COMMANDS]
    assert panels == ["Options", *cli._PANELS]


def test_help_imports_no_command() -> None:
    look = (
        "import sys; from lorad.cli.app import app; app(['--help'], standalone_mode=False);"
        "print([name for name in sys.modules if name.startswith('lorad.cli.commands.')])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_init_names_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("init", "--model", "nosuchdir", "--data", "rows.jsonl")
    told = capsys.readouterr().err
    assert "there is no directory nosuchdir" in told and "there is no file rows.jsonl" in told
    (tmp_path / "here").mkdir()
    for model in ("here", "builtin:tiny", "org/name"):
        run("init", "--force", "--model", model, "--data", "sort")
    assert "warning" not in capsys.readouterr().err
