"""Completion in real shells: what `lorad completion` prints is sourced, keys are typed, and the terminal is
read.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.client.client import Client
from lorad.models.directory import BUILTIN
from lorad.spec.numbers import BUILTIN_MODELS
from tests.kit.frozen.world import frozen
from tests.kit.pty_kit import Terminal
from tests.kit.warm.processes import CLIENT as WARM

__all__ = ["frozen"]
BIN = str(Path(sys.executable).parent)
SHELLS = {  # without what this machine's user has configured
    "bash": (["--norc", "--noprofile", "-i"], "source <(lorad completion bash)"),
    "zsh": (["-f", "-i"], "source <(lorad completion zsh)"),
    "fish": (["--no-config", "-i"], "lorad completion fish | source"),
}
# what is typed before the tabulator, and what is then on the line
EACH = (  # in each shell: each has its own way with spaces, @ and =
    ("lorad show --js", "lorad show --json "),
    ("lorad pin sorter@47", "lorad pin sorter@47 "),
    ("lorad stop sorter --state lost,fai", "lorad stop sorter --state lost,failed "),
    ("lorad resume bold-lr trainer.mi", "lorad resume bold-lr trainer.min_lr="),
    ("lorad run my-s", "lorad run my-spec.yaml "),
    ("lorad run my-spec.yaml data.train=my-r", "lorad run my-spec.yaml data.train=my-rows.jsonl "),
)
MORE = (  # in one shell: who is asked is the same in all
    ("lorad doc", "lorad doctor "),
    ("lorad show one-a", "lorad show one-answer "),
    ("lorad swap cana", "lorad swap canary "),
    ("lorad export summaries@119", "lorad export summaries@119 "),
    ("lorad plot sorter --metric entr", "lorad plot sorter --metric entropy "),
    ("lorad resume bold-lr --from 11", "lorad resume bold-lr --from 110 "),
    ("lorad list --columns name,trainer.mi", "lorad list --columns name,trainer.min_lr "),
    ("lorad pin sorter@la", "lorad pin sorter@latest "),
    ("lorad daemon stat", "lorad daemon status "),
    ("lorad run my-spec.yaml algorithm.sc", "lorad run my-spec.yaml algorithm.scale="),
    ("lorad run my-spec.yaml trainer.schedule=cos", "lorad run my-spec.yaml trainer.schedule=cosine "),
)


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, frozen: Client, tmp_path: Path) -> Iterator[Terminal]:
    """A shell in which completion is installed, in a folder with two files."""
    if (program := shutil.which(request.param)) is None:
        pytest.skip(f"there is no {request.param} here")
    for name in ("my-spec.yaml", "my-rows.jsonl"):
        (tmp_path / name).touch()
    (program_of_ours := tmp_path / "bin" / "lorad").parent.mkdir()
    program_of_ours.write_text(f'#!/bin/sh\nexec {shlex.join(WARM)} {BIN}/lorad "$@"\n')
    program_of_ours.chmod(0o755)
    home = {"HOME": str(tmp_path), "LORAD_HOME": str(frozen.home.root), "XDG_CONFIG_HOME": str(tmp_path)}
    home["ZDOTDIR"] = str(tmp_path)
    path = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "TERM": "xterm",
        "PS1": "> ",
        "ZDOTDIR": str(tmp_path),
    }
    options, install = SHELLS[request.param]
    environment = {name: value for name, value in os.environ.items() if name != "LORAD_HOME"} | home | path
    terminal = Terminal([program, *options], 200, environment)
    try:
        terminal.type(f"cd {tmp_path}; {install}; echo ready-$((40 + 2))\r".replace("$((40 + 2))", "''42"))
        terminal.until("ready-42")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.system
def test_a_shell_completes_what_is_typed(shell: Terminal, request: pytest.FixtureRequest) -> None:
    is_first = request.node.callspec.params["shell"] == next(iter(SHELLS))
    for typed, then in EACH + MORE * is_first:
        # to the beginning of the line, to its end: the line prints itself
        shell.type(f"{typed}\t\x01echo '<\x05>'\r")
        shell.until(rf"[\r\n]<{re.escape(then.rstrip())} ?>[\r\n]")


def test_a_shell_lists_what_it_can_be(shell: Terminal) -> None:
    shell.type("lorad pin sorter@4\t\t")
    shell.until("47", "46", "41")


def asked(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LORAD_HOME": str(home), "_LORAD_COMPLETE": "zsh"} | more
    return subprocess.run(
        [f"{BIN}/lorad", *words], env=environment, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(
    "words", [("show", ""), ("pin", "a@"), ("plot", "a", "--metric", ""), ("nonsense", ""), ()]
)
def test_completion_without_a_home_is_silent(words: tuple[str, ...], home: Path) -> None:
    done = asked(home / "none", *words)
    assert (done.stdout, done.stderr) == ("", "") or words == ()
    assert not (home / "none").exists()


def test_only_verbs_are_completed_with_descriptions(frozen: Client) -> None:
    assert "doctor\tcheck this machine and this home" in asked(frozen.home.root, "d").stdout
    assert asked(frozen.home.root, "logs", "--of", "dr").stdout == "plain\tdriver\t\n"


def test_completion_reads_no_slow_package() -> None:
    code = (
        "import sys; from lorad.cli import app, complete; from typer.main import get_command\n"
        "complete._candidates(get_command(app.app), ['run', 'a.yaml'], 'trainer.')\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"textual", "yaml", "numpy", "torch", "aiohttp", "asyncio", "rich"} & set(loaded)


def test_models_that_ship_are_offered() -> None:
    assert set(BUILTIN_MODELS) == BUILTIN.keys()
