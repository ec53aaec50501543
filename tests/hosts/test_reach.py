"""Of every command it is said what it does about another box."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from lorad.api.inputs import axes, overrides
from lorad.box.paths import Home
from lorad.cli.app import _COMMANDS
from lorad.cli.commands.machine import reach
from lorad.client.boxes import hosts
from lorad.client.boxes.entry import BoxEntry, hosts_path
from lorad.client.boxes.hosts import check_entry, far_home, place, read_hosts
from lorad.client.boxes.remote import FarHome
from lorad.client.client import Client
from lorad.errors import SpecError


@pytest.fixture(autouse=True)
def one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hosts.yaml with the box h2, and no LORAD_HOME."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LORAD_HOME", raising=False)
    monkeypatch.delenv("LORAD_HOST", raising=False)
    monkeypatch.setenv("LORAD_HOST_CWD", "")
    hosts_path().parent.mkdir()
    hosts_path().write_text("hosts: {h2: {ssh: ann@h2, home: ~/other, cwd: ~/exp}}\n")
    with tempfile.TemporaryDirectory(prefix="lr-") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield


def test_every_command_has_a_way() -> None:
    assert set(reach.REACH) == set(_COMMANDS)


def test_files_of_another_box_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAD_HOST", "h2")
    with pytest.raises(SpecError, match="which is on h2"):
        _ = Client().home


@pytest.mark.parametrize("command", [name for name, way in reach.REACH.items() if way == reach.THERE])
def test_commands_with_files_run_there(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def call(box: FarHome, words: list[str]) -> int:
        called.append([box.name, *words])
        return 3

    monkeypatch.setattr(FarHome, "call", call)
    with pytest.raises(typer.Exit) as ended:
        reach.go([command, "--json"], "h2", None)
    assert called == [["h2", command, "--json"]] and ended.value.exit_code == 3


def test_hosts_that_cannot_be_read_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "read_text", _forbidden)
    assert isinstance(place(), Home)
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)
    assert isinstance(place(), Home)


def _forbidden(path: Path) -> str:
    raise PermissionError(13, "Permission denied", str(path))


def test_paths_from_python_begin_on_their_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    keys, here = {"data.train": "rows.jsonl"}, f'data.train="{tmp_path}/rows.jsonl"'
    assert overrides(keys, far_home("h2")) == axes({"data.train": ["rows.jsonl"]}, far_home("h2"))
    assert overrides(keys, far_home("h2")) == ["data.train=rows.jsonl"]
    monkeypatch.setenv("LORAD_HOST", "h2")
    assert overrides(keys, Home(tmp_path)) == [here]


def test_a_job_is_refused() -> None:
    with pytest.raises(SpecError, match="a daemon of its own"):
        reach.go(["job", "spec.yaml"], "h2", None)
    with pytest.raises(SpecError, match="on this machine"):
        reach.go(["try", "spec.yaml", "--rewards", "-"], "h2", None)


def test_cwd_without_a_host_is_refused() -> None:
    with pytest.raises(SpecError, match="--cwd is a directory of another box"):
        reach.go(["list"], None, "/tmp")


def test_a_home_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_path().write_text(hosts_path().read_text() + "default: h2\n")
    assert isinstance(place(), FarHome)
    monkeypatch.setenv("LORAD_HOST", "here")
    assert isinstance(place(), Home)
    monkeypatch.delenv("LORAD_HOST")
    monkeypatch.setenv("LORAD_HOME", "/somewhere")
    assert place() == Home(Path("/somewhere"))


def test_an_address_needs_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAD_HOST", "ssh://ann@h7:22/srv/lorad")
    box = place()
    assert isinstance(box, FarHome) and box.entry == BoxEntry("ssh://ann@h7:22", home="/srv/lorad")


@pytest.mark.parametrize("ssh", ["-oProxyCommand=touch x", "", "h2 true"])
def test_options_are_no_destinations(ssh: str) -> None:
    with pytest.raises(SpecError, match="no destination of ssh"):
        check_entry("h2", BoxEntry(ssh))


@pytest.mark.parametrize("text", ["hosts: [h1]", "hosts: {h1: {shh: a}}", "default: h9", "{"])
def test_mistakes_in_the_file_are_told(text: str) -> None:
    hosts_path().write_text(text)
    with pytest.raises(SpecError):
        read_hosts()


def test_words_reach_the_shell_whole() -> None:
    box = FarHome("h2", BoxEntry("h2", "~/venv s/lorad", "~/a b", "~/exp; x"))
    words = box.words(["note", "run", "it's $HOME"], cwd=box.entry.cwd)
    assert words.startswith("cd ~/'exp; x' && exec env LORAD_HOST=here 'LORAD_HOME=~/a b' ~/'venv s/lorad' ")
    assert words.endswith("""note run 'it'"'"'s $HOME'""")


def test_long_names_of_sockets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("d" * 90)))
    (tmp_path / ("d" * 90)).mkdir()
    with pytest.raises(Exception, match="too long a name"):
        _ = FarHome("h2", BoxEntry("h2")).socket


def test_default_is_here() -> None:
    assert isinstance(place(), Home) and hosts.read_hosts().default == "here"
