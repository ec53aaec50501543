"""README and docs: every command, key, link and name of a file in them is true."""

import re
import shlex
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from lorad.box.config import load
from lorad.cli.app import app
from lorad.spec.text import load_spec
from tests.house_figures import own_code
from tests.kit.world import REPOSITORY
from tests.make_docs import DOCS, about, whole

SKILL = "cli/commands/skill/SKILL.md"
PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in [REPOSITORY / "README.md", REPOSITORY / SKILL, *DOCS.rglob("*.md")]
}
AROUND = {path.name: path.read_text() for path in REPOSITORY.glob("*.md")}
LINKED = sorted({**PAGES, **AROUND})
README_LIMIT = 150  # lines
WIDEST_PROSE = 120  # columns

BLOCKS = [
    block for text in PAGES.values() for block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.M)
]
LINES = chain.from_iterable(text.splitlines() for kind, text in BLOCKS if kind == "console")
TYPED = [line[2:].partition("  #")[0] for line in LINES if line[:2] in ("$ ", "# ")]
IN_PROSE = [found for text in PAGES.values() for found in re.findall(r"`(lorad [a-z][^`]*)`", text)]
_COMMAND = re.compile(r"""(?<![/\w])lorad ([a-z].*?)(?: *; done|\)")?$""")
FOUND = (_COMMAND.search(line.strip()) for line in (*TYPED, *IN_PROSE))
COMMANDS = sorted({found[1] for found in FOUND if found})


def yaml_of(page: str, begins: str) -> str:
    (found,) = (
        text for text in re.findall(r"^```yaml\n(.*?)^```", PAGES[page], re.DOTALL | re.M) if begins in text
    )
    return str(found)


def anchors(text: str) -> set[str]:
    """The names that a page's headings have in links."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


GLOSSARY = re.findall(r"^\| (?!word )(\w+) \|", PAGES["docs/glossary.md"], re.MULTILINE)
NAME = re.compile(r"(?:\bclass |\bdef |^ +(?=\w+:))(\w+)", re.MULTILINE)  # of a class, a function or a field


def words_of_names() -> set[str]:
    """List the words in the names of modules, classes, functions and fields, in small letters."""
    names = {name for path in own_code() for name in (path.stem, *NAME.findall(path.read_text()))}
    return {word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+", name)}


def test_words_of_the_glossary_occur_in_names() -> None:
    words = words_of_names()
    assert [word for word in GLOSSARY if words.isdisjoint({word, f"{word}s"})] == []


def test_no_word_of_the_glossary_stands_twice() -> None:
    assert [word for word, times in Counter(GLOSSARY).items() if times > 1] == []


def test_the_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= README_LIMIT


def prose(text: str) -> list[str]:
    """List the lines of a page that are neither its head, code, tables, pictures nor comments."""
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if not line.lstrip().startswith(("|", "<!--", "![", "[!["))]


@pytest.mark.parametrize("page", LINKED)
def test_prose_is_not_wider_than_a_page(page: str) -> None:
    assert [line for line in prose({**PAGES, **AROUND}[page]) if len(line) > WIDEST_PROSE] == []


@pytest.mark.parametrize("page", PAGES)
def test_parts_made_from_the_code_are_current(page: str) -> None:
    assert whole(PAGES[page]) == PAGES[page], "run `make docs`"


def test_every_made_part_is_in_a_page() -> None:
    parts = [
        (page, name)
        for page, text in PAGES.items()
        for name in re.findall(r"made from the code: (\w+)", text)
    ]
    assert sorted(parts) == [
        ("docs/algorithms.md", "presets"),
        ("docs/architecture/index.md", "rooms"),
        ("docs/architecture/requests.md", "requests"),
        ("docs/cli.md", "commands"),
        ("docs/configuration.md", "config"),
        ("docs/engines.md", "limits_of_engines"),
        ("docs/metrics.md", "metrics"),
        ("docs/python.md", "python"),
        ("docs/spec.md", "spec"),
        ("docs/trainers.md", "limits_of_trainers"),
    ]


def test_the_spec_of_the_docs_is_accepted() -> None:
    assert load_spec(yaml_of("docs/spec.md", "name: sorter"), source="docs").name == "sorter"


@pytest.mark.parametrize(("page", "begins"), [("configuration", "storage:"), ("tui", "alarms:")])
def test_the_config_of_the_docs_is_accepted(tmp_path: Path, page: str, begins: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml_of(f"docs/{page}.md", begins))
    load(tmp_path / "config.yaml")


def test_what_the_docs_call_all_may_be_0() -> None:
    kept = load_spec("checkpoint: {keep: 0, keep_versions: 0, keep_samples: 0}").checkpoint
    assert (kept.keep, kept.keep_versions, kept.keep_samples) == (0, 0, 0)


@pytest.mark.parametrize("typed", COMMANDS)
def test_commands_of_the_docs_are_commands(typed: str) -> None:
    words = [word for word in shlex.split(typed) if word != "<"]
    command: Any = get_command(app)
    with typer.Context(command) as context:
        while isinstance(command, TyperGroup) and words:
            command = command.get_command(context, words.pop(0))
            assert command is not None
        flags = [word.partition("=")[0] for word in words if word.startswith("-") and word != "-"]
        known = {
            flag
            for parameter in command.get_params(context)
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        takes_any = command.context_settings.get("ignore_unknown_options")  # -WORD takes a tag off
        assert [flag for flag in flags if flag not in known and not takes_any] == []


def test_make_targets_of_the_docs_are_targets() -> None:
    named = {
        name for text in {**PAGES, **AROUND}.values() for name in re.findall(r"`make ([a-z0-9-]+)", text)
    }
    made = re.findall(r"^([\w\- ]+):(?!=)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert named - set(" ".join(made).split()) == set()


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (REPOSITORY / page).read_text())
    for link in (link for link in links if not link.startswith(("http", "mailto"))):
        path, _, anchor = link.partition("#")
        target = ((REPOSITORY / page).parent / path).resolve() if path else REPOSITORY / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_pages_are_reachable_from_the_readme() -> None:
    seen, ahead = set(), ["README.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", (REPOSITORY / page).read_text())
        places = [
            ((REPOSITORY / page).parent / link).resolve() for link in links if not link.startswith("http")
        ]
        ahead += {str(path.relative_to(REPOSITORY)) for path in places} - seen - set(ahead)
    assert set(PAGES) - seen == set()


def test_files_on_the_map_exist() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", PAGES["docs/architecture/index.md"])
    assert [
        name
        for name in named
        if not any((root / name).exists() for root in (REPOSITORY / "lorad", REPOSITORY))
    ] == []


@pytest.mark.parametrize(
    "room", [folder.name for folder in (REPOSITORY / "lorad").iterdir() if (folder / "__init__.py").exists()]
)
def test_each_room_names_the_tests_that_hold_it(room: str) -> None:
    purpose, data, change = about(room)
    assert purpose and data
    assert re.search(r"`tests/[\w/]+(?:\.py|/)`", change), change


def test_a_change_touches_at_most_four_files() -> None:
    table = PAGES["docs/architecture/index.md"].partition("## Where a change goes")[2]
    rows = re.findall(r"^\| ((?:an?|its) .+?) \| (.+?) \|", table, re.M)
    assert len(rows) >= 10
    named = {change: re.findall(r"`[\w/<>]+(?:\.py|/)`", files) for change, files in rows}
    assert {change: files for change, files in named.items() if not 1 <= len(files) <= 4} == {}


def test_rows_of_what_was_read_name_their_tests() -> None:
    section = PAGES["docs/lab/gpu-day.md"].partition("## What reading found")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+|[BWS]\d+) \|", section, re.MULTILINE)
    letters = {"B": range(2, 6), "W": range(1, 7), "S": range(11)}
    assert rows == [*map(str, range(1, 18)), *(f"{name}{n}" for name, each in letters.items() for n in each)]
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert {*re.findall(r"`(test_\w+)`", section)} <= {*re.findall(r"def (test_\w+)", tests)}
