"""The commands of README and docs do what the pages say: typed into a shell, against a real daemon.

Every `lorad` command of a page is run, and every line of its console blocks: it exits with 0, or is refused
with the error that the page prints; a table has the columns that the page prints. Files that a page speaks of
are made here, small. What cannot run has its reason in the page, in a comment that is not shown:

    <!-- not run by the tests: REASON -->              above a console block, for all of it
    <!-- not run by the tests (lorad tui): REASON -->  anywhere in a page, for its commands that begin so

`make` targets that a sentence names are left to `tests/test_make_targets.py`.
"""

import contextlib
import functools
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from lorad.cli.app import app
from lorad.errors import Conflict, NotFound
from lorad.protocol.listener import answers
from tests.kit.warm.processes import CLIENT as WARM
from tests.kit.world import REPOSITORY, World, world

pytestmark = pytest.mark.system

FIRST = ("docs/getting-started.md", "docs/many-runs.md", "docs/serving.md")  # make what others speak of
LAST = "docs/reliability.md"  # ends daemon and pools
OTHERS = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md"))
SKILL = "cli/commands/skill/SKILL.md"
NAMES = (*FIRST, "README.md", SKILL, *(name for name in OTHERS if name not in (*FIRST, LAST)), LAST)
PAGES = {name: (REPOSITORY / name).read_text() for name in NAMES}

PART = re.compile(r"<!-- not run by the tests(?: \((.+?)\))?: .+? -->|^```(\w*)\n(.*?)^```", re.DOTALL | re.M)
STANDS_FOR = {
    "RUN@N": "r1@12",
    "RUN": "r1",
    "ALIAS": "bot",
    "MODEL": "builtin:tiny",
    "NAME=DIR": "helper=./adapter",
    "key=value": "trainer.lr=3e-4",
    "120": "100",  # steps
}

# Any letter is as likely as any other, so that rewards differ and every step is an update.
SMALL = """
model: {path: builtin:tiny}
lora: {rank: 2, target_modules: [q_proj]}
algorithm: {group_size: 24}
data: {train: sort, prompts_per_step: 1}
reward: {name: regex, pattern: "[A-Z]"}
trainer: {lr: 1.0e-6, steps: STEPS}
rollout: {max_new_tokens: 2, temperature: 90.0}
eval: {every: 0}
checkpoint: {every: 10, keep: 3}
"""
FILES = {
    "examples/demo.yaml": SMALL.replace("STEPS", "60"),
    "run.yaml": SMALL.replace("STEPS", "12"),
    "spec.yaml": SMALL.replace("STEPS", "2"),
    "rows.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": \n',
}
OTHER_FILES = {  # by what a command has in it or prints
    "lorad sweep": {"run.yaml": SMALL.replace("STEPS", "3")},
    "trainer.lr=3e-4": {"run.yaml": SMALL.replace("STEPS", "3")},
    "lora.rnak": {"run.yaml": "model: {path: builtin:tiny}\nlora:\n  rnak: 8\n"},
}
ACTS_ON = re.compile(r"lorad (pause|resume) (\w+)$")  # a run that works, or one that is paused
MEANWHILE = re.compile(r"lorad (pause|stop|kill) ")  # others wait until no run is active
ALONE = ("lorad daemon start", "lorad doctor --repair")  # where no daemon runs
OTHER_POOL = "rollout.backend=transformers"  # what serves has the only device, and would keep it


@dataclass(frozen=True)
class Command:
    """What a page says to type.

    prints: the lines that the page shows below it.
    skipped: a reason stands above its block.
    """

    text: str
    prints: tuple[str, ...] = ()
    skipped: bool = False

    @property
    def typed(self) -> str:
        words = re.split(r"(\s+)", self.text)
        return "".join(STANDS_FOR.get(word, word) for word in words)


def blocks(page: str) -> Iterator[Command]:
    """Yield what stands behind a prompt in the console blocks of a page."""
    skipped = False
    for found in PART.finditer(PAGES[page]):
        if found[0].startswith("<!--"):
            skipped = skipped or found[1] is None
            continue
        parts = re.split(r"^(?=[$#] )", found[3], flags=re.M) if found[2] == "console" else []
        for first, *rest in (part.splitlines() for part in parts if part):
            yield Command(first[2:].partition("  #")[0].strip(), tuple(rest), skipped)
        skipped = False


def prose(page: str) -> Iterator[Command]:
    """Yield the commands of a page's sentences and tables that are whole."""
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.DOTALL | re.M)
    for found in re.findall(r"`(lorad [a-z][^`]*)`", text):
        if is_whole(found):
            yield Command(found)


def is_whole(text: str) -> bool:
    """Whether a command has all that it needs; without them only its name is mentioned.

    Verbs for many runs want names or filters (`lorad resume` is refused), and … stands for words of a user.
    """
    if "…" in text:
        return False
    words, command = shlex.split(text)[1:], get_command(app)
    with typer.Context(command) as context:
        while isinstance(command, TyperGroup):
            found = command.get_command(context, words.pop(0)) if words else None
            if found is None:
                return False
            command = found
        options: dict[str, Any] = {
            name: option for option in command.params for name in option.opts if name.startswith("-")
        }
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        if not words and any(param.name == "runs" for param in arguments):
            return False
        needed, given = sum(param.required for param in arguments), 0
        while words:
            word = words.pop(0)
            if not word.startswith("-"):
                given += 1
            elif (option := options.get(word)) is not None and not option.is_flag:
                if not words:
                    return False
                words.pop(0)
        return given >= needed


@functools.cache
def commands(page: str) -> list[Command]:
    return [*blocks(page), *prose(page)]


def reasons(page: str) -> list[str]:
    """List the beginnings of commands that a page has a reason for."""
    return [found[1] for found in PART.finditer(PAGES[page]) if found[1]]


def is_run(page: str, command: Command) -> bool:
    return not command.skipped and not command.text.startswith(tuple(reasons(page)))


class Shell:
    """A user's shell in an empty directory, which is `~`, too: pages write secrets there.

    A command that several pages have is typed once.
    """

    def __init__(self, made: World) -> None:
        self.made, self.done, self.broken = made, set[str](), set[str]()
        (made.root / "bin").mkdir()
        (made.root / "examples").mkdir()
        (made.root / "bin" / "lorad").write_text(f'#!/bin/sh\nexec {shlex.join(WARM)} -m lorad "$@"\n')
        (made.root / "bin" / "lorad").chmod(0o755)

    def type(self, command: Command) -> None:
        """Type a command once; its exit code and what it prints must be what the page says."""
        if command.typed in self.done:
            return
        self._prepare(command)
        done = self._bash(command.typed)
        said = f"{command.typed} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        if command.prints and command.prints[0].startswith("error:"):
            assert done.returncode != 0, said
            assert re.fullmatch(pattern(command.prints), words(done.stderr)), said
        else:
            assert done.returncode == 0, said
            there = {tuple(line.split("\t")) for line in done.stdout.splitlines()}
            assert set(headers(command.prints)) <= there, said
        self.done.add(command.typed)

    def _prepare(self, command: Command) -> None:
        """Write the files that are spoken of, and let a daemon run, or none."""
        files = dict(FILES)
        for mark, others in OTHER_FILES.items():
            if mark in command.text or mark in "".join(command.prints):
                files |= others
        if command.text.startswith("lorad init"):
            (self.made.root / "run.yaml").unlink(missing_ok=True)
            del files["run.yaml"]
        for name, text in files.items():
            (self.made.root / name).write_text(text)
        is_up = answers(self.made.home.socket)
        if is_up and not MEANWHILE.match(command.text):
            self.made.until(lambda: not active(self.made), "no run is active")
        if is_up == (command.text in ALONE):
            self.made.lorad("daemon", "stop" if is_up else "start")
        if OTHER_POOL in command.text:
            with contextlib.suppress(NotFound):  # nothing serves
                self.made.client.stop_serving(STANDS_FOR["MODEL"])
        if found := ACTS_ON.match(command.typed):
            self._bring(found[2], "running" if found[1] == "pause" else "paused")

    def _bring(self, run: str, state: str) -> None:
        """Have the run work, or be paused; one that has completed meanwhile gets more steps."""
        while (shown := self.made.client.show(run)).state in ("ended", "paused") and shown.state != state:
            self.made.client.resume(run, steps=shown.steps + 40)
            if state == "paused":
                with contextlib.suppress(Conflict):  # it is over already
                    self.made.client.pause(run)
                self.made.over(run)

    def _bash(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", text],
            cwd=self.made.root,
            env=os.environ
            | {"LORAD_HOME": str(self.made.home.root), "HOME": str(self.made.root)}
            | {"PYTHONPATH": str(REPOSITORY)}
            | {"PATH": f"{self.made.root / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            check=False,
        )


def active(made: World) -> list[str]:
    return [run.name for run in made.client.list(all=True) if run.state not in ("ended", "paused")]


def words(text: str) -> str:
    return " ".join(text.split())


def pattern(lines: tuple[str, ...]) -> str:
    """Make the pattern of what is printed; … stands for anything, and lines may break elsewhere."""
    return ".*".join(re.escape(part) for part in words("\n".join(lines)).split("…"))


def headers(lines: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Find the headings of printed tables: the first line, and the first one after an empty line."""
    first = [line for before, line in zip(("", *lines), lines, strict=False) if not before]
    columns = [tuple(re.split(r" {2,}", line.strip())) for line in first]
    return [row for row in columns if len(row) > 2 and not any(re.search(r"[\d@]", cell) for cell in row)]


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with world() as made:
        yield Shell(made)


@pytest.mark.parametrize(
    "page", [page for page in NAMES if re.search("`lorad [a-z]|^```console", PAGES[page], re.M)]
)
def test_commands_of_a_page_run_as_printed(shell: Shell, page: str) -> None:
    before = FIRST[: FIRST.index(page)] if page in FIRST else FIRST
    for name in (*before, page):
        if name in shell.broken and name != page:
            pytest.skip(f"needs what {name} makes, which fails")
        shell.broken.add(name)
        for command in commands(name):
            if is_run(name, command):
                shell.type(command)
        shell.broken.remove(name)


@pytest.mark.parametrize("page", NAMES)
def test_a_reason_stands_at_a_command(page: str) -> None:
    texts = [command.text for command in commands(page)]
    idle = [begins for begins in reasons(page) if not any(text.startswith(begins) for text in texts)]
    assert idle == []
    alone = re.findall(r"(<!-- not run by the tests: .+? -->)(?!\s*(?:<!-- not run|```console))", PAGES[page])
    assert alone == []
