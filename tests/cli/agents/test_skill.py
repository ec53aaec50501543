"""`lorad skill`: prints SKILL.md, installs it with references, and says when a copy is old."""

import json
from pathlib import Path

import pytest

from lorad import __version__
from lorad.cli.app import app
from lorad.errors import SpecError
from lorad.spec.errors import leaves
from lorad.spec.model import Spec

LIMIT = 150  # lines


def skill(*arguments: str) -> None:
    app(["skill", *arguments], standalone_mode=False)


@pytest.fixture(autouse=True)
def of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def test_the_skill_is_short_and_has_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    skill()
    printed, notes = capsys.readouterr()
    assert printed.startswith("---\nname: lorad\n") and f'lorad: "{__version__}"' in printed
    assert printed.count("\n") <= LIMIT and notes == ""


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["claude"], "ann/.claude/skills"),
        (["codex"], "ann/.codex/skills"),
        (["opencode"], "ann/.config/opencode/skills"),
        (["claude", "--project"], "project/.claude/skills"),
        (["./here"], "project/here"),
    ],
)
def test_the_skill_is_copied_where_agents_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], place: str
) -> None:
    skill()
    printed, _ = capsys.readouterr()
    skill("--install", *arguments, "--json")
    directory = tmp_path / place / "lorad"
    assert json.loads(capsys.readouterr().out) == {"directory": str(directory), "version": __version__}
    assert (directory / "SKILL.md").read_text() == printed


def test_references_have_every_key_and_command(tmp_path: Path) -> None:
    skill("--install", ".")
    texts = {
        path.stem: path.read_text() for path in (tmp_path / "project" / "lorad" / "references").iterdir()
    }
    assert [key for key in leaves(Spec) if f"`{key}`" not in texts["spec"]] == []
    assert "## lorad sweep [OPTIONS]" in texts["commands"] and "- `--halving`: " in texts["commands"]
    assert "- `dr_grpo`: baseline group, scale one" in texts["algorithms"]


def test_a_copy_of_another_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skill("--install", "claude")
    skill("--install", "codex", "--project")
    copy = tmp_path / "ann" / ".claude" / "skills" / "lorad" / "SKILL.md"
    copy.write_text(copy.read_text().replace(__version__, "0.0.1"))
    capsys.readouterr()
    skill()
    assert capsys.readouterr().err == f"{copy} is of another version: `lorad skill --install claude`.\n"
    skill("--install", "claude")
    capsys.readouterr()
    skill()
    assert capsys.readouterr().err == ""


def test_a_project_needs_the_name_of_a_program() -> None:
    with pytest.raises(SpecError, match="--project has no program"):
        skill("--install", "./here", "--project")


def test_unknown_verbs_are_refused_before_the_start() -> None:
    with pytest.raises(SpecError, match="--allow rm: there is no such verb"):
        app(["mcp", "--allow", "run,rm"], standalone_mode=False)
    with pytest.raises(SpecError, match="not a directory"):
        app(["mcp", "--base", "./nowhere"], standalone_mode=False)
