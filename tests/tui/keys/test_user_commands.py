"""Commands of the user's own on keys: asked first, never read by a shell, off where nothing may be done."""

import json
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from lorad.box.config import Config, Tui, UserCommand, parse_config
from lorad.errors import SpecError
from tests.kit.tui_world import World, a_run, screen_text, until, using

WRITES = "import json, sys; path = sys.argv.pop(1); json.dump(sys.argv[1:], open(path, 'w')); print('copied')"


def tool(tmp_path: Path, arguments: str, *, ask: bool = True) -> Config:
    """A command that writes its arguments to `argv`."""
    script = tmp_path / "tool.py"
    script.write_text(WRITES)
    words = f"{sys.executable} {script} {tmp_path / 'argv'} {arguments}"
    return Config(tui=Tui(commands={"F5": UserCommand(words, ask)}))


def a_world(name: str = "bold") -> World:
    world = World(a_run(name))
    details = {**a_run(name), "directory": "/srv/runs/bold"}
    world.answers |= {f"runs/{quote(name, safe='')}": details, "pools": [], "devices": [], "events": []}
    return world


async def test_a_command_is_asked_for_and_run(tmp_path: Path) -> None:
    config = tool(tmp_path, "-a $DIR/ 'to $RUN' ${VERSION}")
    async with using(a_world(), config=config) as user:
        await until(user, lambda: "bold" in screen_text(user))
        await user.press("f5")
        await until(user, lambda: "On this machine, as you" in screen_text(user))
        assert not (tmp_path / "argv").exists()
        await user.press("y")
        await until(user, lambda: (tmp_path / "argv").exists() and "copied" in screen_text(user))
    assert json.loads((tmp_path / "argv").read_text()) == ["-a", "/srv/runs/bold/", "to bold", "bold@3"]


@pytest.mark.parametrize("name", ["a;b", "$(id)", "-rf", "a b", "`id`", "a\nb"])
async def test_a_hostile_name_is_no_argument(name: str, tmp_path: Path) -> None:
    async with using(a_world(name), config=tool(tmp_path, "$RUN", ask=False)) as user:
        await until(user, lambda: "1 running" in screen_text(user))
        await user.press("f5")
        await until(user, lambda: "nothing is run" in screen_text(user) or "✖" in screen_text(user))
    assert not (tmp_path / "argv").exists()


async def test_readonly_runs_no_command(tmp_path: Path) -> None:
    async with using(a_world(), readonly=True, config=tool(tmp_path, "$RUN", ask=False)) as user:
        await until(user, lambda: "bold" in screen_text(user))
        await user.press("f5")
        await until(user, lambda: "Read-only: nothing is done." in screen_text(user))
    assert not (tmp_path / "argv").exists()


async def test_a_command_that_fails_says_so(tmp_path: Path) -> None:
    commands = {"F6": UserCommand("false", False), "F7": UserCommand("/nowhere/tool $RUN", False)}
    async with using(a_world(), config=Config(tui=Tui(commands=commands))) as user:
        await until(user, lambda: "bold" in screen_text(user))
        await user.press("f6")
        await until(user, lambda: "exit code 1" in screen_text(user))
        await user.press("f7")
        await until(user, lambda: "/nowhere/tool cannot be run: No such file" in screen_text(user))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('F5: {run: "rsync \'x"}', "run has a quote that is not closed"),
        ("F5: {run: ''}", "run is empty"),
        ("F5: {run: echo $HOME}", r"run has \$HOME; there are \$RUN, \$VERSION and \$DIR"),
        ("F1: {run: ls}", "F1 is no key for a command; take F2 to F24"),
        ("k: {run: ls}", "k is no key for a command"),
        ("F5: {rnu: ls}", "rnu"),
    ],
)
def test_a_wrong_command_is_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_config(f"tui: {{commands: {{{text}}}}}", "config.yaml")
