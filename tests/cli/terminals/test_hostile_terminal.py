"""What a real terminal gets when every text of the daemon is made to hurt it: text, and no escapes but
lorad's own.
"""

import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from textual.content import Content

from lorad.cli import follow
from lorad.cli.output import json_text
from lorad.cli.table import cells
from lorad.records.measured import Step
from lorad.records.runs import RunDetails
from lorad.records.samples import Sample
from tests.kit.frozen.world import frozen_world
from tests.kit.hostile_lorad import BLINK, POISON, TITLE
from tests.kit.tui_world import World, a_run, names, until, using
from tests.kit.world import REPOSITORY

COMMANDS = (
    *("list", "list --all --json", "show support-bot", "show support-bot --json", "logs support-bot"),
    *(
        "samples support-bot",
        "adapters support-bot",
        "checkpoints sorter",
        "aliases --traffic",
        "pools",
        "devices",
    ),
    *(
        "top",
        "top --json",
        "verify support-bot",
        "gc --dry-run",
        "rm gsm8k-32k",
        "pin support-bot@200",
        "show nobody",
    ),
    *(
        "swap bot support-bot@312",
        "daemon status",
        "generate support-bot hello",
        "generate support-bot hello --json",
    ),
)
HURT = {
    "a title": TITLE[:4],
    "a bell": "\x07",
    "blinking": BLINK,
    "8-bit controls": "\x9b",
    "backwards": "\u202e",
}


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, str]]:
    """What each command wrote to its terminal."""
    root = Path(tempfile.mkdtemp(prefix="lr-"))
    try:
        with frozen_world(root, 0.3):
            parts = written(root, *COMMANDS).split("==> ")[1:]
            yield {part.partition("\r\n")[0]: part.partition("\r\n")[2] for part in parts}
    finally:
        shutil.rmtree(root)


def written(home: Path, *commands: str) -> str:
    """Run the commands in a pseudo-terminal whose user answers no; returns all that they wrote."""
    ours, theirs = pty.openpty()
    env = os.environ | {"LORAD_HOME": str(home), "COLUMNS": "160", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "tests.kit.hostile_lorad", *commands]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=REPOSITORY
    ) as process:
        os.close(theirs)
        os.write(ours, b"n\n")
        out = b""
        try:
            while some := os.read(ours, 1 << 16):
                out += some
        except OSError:  # EIO: nobody has the terminal any more
            pass
        process.wait()
    os.close(ours)
    return out.decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_shows_hostile_text_as_text(told: dict[str, str], command: str) -> None:
    assert "PWNED" in told[command]
    assert [name for name, raw in HURT.items() if raw in told[command]] == []


def test_json_is_the_same_data_without_raw_controls() -> None:
    data = {f"a{POISON}": [POISON, "漢字 é", "\ud800"]}
    assert json.loads(json_text(data)) == data
    assert "漢字 é" in json_text(data) and all(raw not in json_text(data) for raw in HURT.values())


def test_the_live_line_shows_hostile_text_as_text() -> None:
    live, terminal = follow.LiveLine(), Console(force_terminal=True, width=200)
    live.update(RunDetails("a", "queued", steps=3, waiting=POISON), [], [])
    with terminal.capture() as shown:
        terminal.print(live.live.get_renderable())
    assert "PWNED" in shown.get() and [name for name, raw in HURT.items() if raw in shown.get()] == []


def test_a_completion_is_text_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    sample = Sample(3, completion=f"{POISON}\n\t漢字 [bold]{'x' * 5000}", answer=POISON * 99, reward=0.5)
    live = follow.LiveLine(lambda step: sample)
    live.live.console.width = 90
    step = Step(3, metrics={"response_length": 2.0, "tokens_per_second": 1.0})
    live.update(RunDetails("a", "running", step=3, steps=9), [step], [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step 3, one sample: 0.500 (answer ")
    assert "⏎ 漢字" not in line and cells(line) <= 90
    assert "PWNED" in line and [name for name, raw in HURT.items() if raw in line] == []


async def test_the_palette_shows_hostile_names_as_text() -> None:
    async with using(World(a_run(f"a{POISON}"))) as user:
        await until(user, lambda: names(user))
        titles = [
            Content.from_markup(one.title).plain for one in user.app.get_system_commands(user.app.screen)
        ]
        assert any("Kill a[bold red]x[/] " in title for title in titles)
        assert [title for title in titles if not title.isprintable()] == []
