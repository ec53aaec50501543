"""`lorad edit RUN` in an editor: what differs is set, what is refused is kept."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.cli.app import app
from lorad.client.client import Client
from lorad.errors import Conflict
from tests.kit.world import World, world

Edit = Callable[..., str]
SPEC = "model: {path: 'builtin:tiny'}\ndata: {train: sort}\ntrainer: {steps: 5}\n"


@pytest.fixture(scope="module")
def box() -> Iterator[World]:
    """A box with a group of which nothing may run."""
    with world() as it:
        it.lorad("daemon", "start")
        it.lorad("groups", "held", "--limit", 0)
        yield it


@pytest.fixture
def edit(
    box: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Edit:
    """Queue a run and edit it by a Python expression of its text, `t`; return what was said."""
    monkeypatch.setenv("LORAD_HOME", str(box.home.root))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    def edited(name: str, expression: str, answer: bool = False) -> str:
        (tmp_path / "spec.yaml").write_text(SPEC)
        box.lorad("run", tmp_path / "spec.yaml", "--name", name, "--detach", "resources.group=held")
        script = tmp_path / "editor.py"
        script.write_text(
            f"import pathlib, sys; p = pathlib.Path(sys.argv[1]); t = p.read_text(); "
            f"p.write_text({expression})"
        )
        monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setattr("typer.confirm", lambda *_, **__: answer)
        app(["edit", name], standalone_mode=False)
        return capsys.readouterr().err

    return edited


def kept(tmp_path: Path) -> list[Path]:
    return [*tmp_path.glob("lorad-*.yaml")]


def shown(box: World, name: str) -> Any:
    return Client(box.home).show(name)


@pytest.mark.system
def test_what_differs_is_set(box: World, edit: Edit, tmp_path: Path) -> None:
    said = edit("a", "t.replace('priority: 0', 'priority: -2').replace('steps: 5', 'steps: 7', 1)")
    assert "with priority -2" in said and kept(tmp_path) == []
    run = shown(box, "a")
    assert (run.priority, run.steps, run.spec["resources"]["group"]) == (-2, 7, "held")
    assert "Nothing was changed" in edit("b", "t") and kept(tmp_path) == []
    assert "Nothing was changed" in edit("c", "''")


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "expression", "says"),
    [
        ("d", "t.replace('priority: 0', 'priority: [')", "lorad-d-"),
        ("e", "t.replace('priority: 0', 'priority: much')", "Expected"),
        ("f", "t + 'lora: {rank: 4}'", "lora.rank cannot be edited"),
        ("g", "t.replace('priority: 0', 'prio: 1')", "unknown key"),
    ],
)
def test_a_refused_text_is_kept(
    box: World, edit: Edit, tmp_path: Path, name: str, expression: str, says: str
) -> None:
    error = edit(name, expression)
    (file,) = kept(tmp_path)
    assert says in error and f"Your text is in {file}" in error
    assert shown(box, name).spec["resources"]["priority"] == 0 and file.stat().st_mode & 0o77 == 0


@pytest.mark.system
def test_a_run_that_left_the_queue_is_refused(box: World, edit: Edit, tmp_path: Path) -> None:
    away = f"(__import__('subprocess').run(['{sys.executable}', '-m', 'lorad', 'kill', 'h', '-y']), t)[1]"
    error = edit("h", f"{away}.replace('priority: 0', 'priority: -1')")
    assert "only a queued run can be edited" in error and len(kept(tmp_path)) == 1
    with pytest.raises(Conflict, match="only a queued run"):
        app(["edit", "h"], standalone_mode=False)


@pytest.mark.system
def test_without_an_editor_nothing_changes(edit: Edit, tmp_path: Path) -> None:
    assert "ended with 3" in edit("i", "sys.exit(3)") and len(kept(tmp_path)) == 1
