"""Runs only the tests that a change can reach: `make test ARGS=--changed`, or `ARGS=--changed=COMMIT`.

A test file reaches what it imports, what that imports in turn, and the modules that strings name, such as
`"module:Class"` in a registry and `f"lorad.cli.commands.{verb}"`. A program, which is a package with a
`__main__`, is reached by tests that name it and by tests that import, themselves or by their kit, the module
that starts it; a program reaches every program that it starts. A file that is no module counts as a change of
the modules that mention it. Where nobody says what a file is for, all tests run.

`tests/conftest.py` imports `pytest_addoption` from here, which brings the other hooks.
"""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

CONCERNS_ALL = ("pyproject.toml", "Makefile", ".ci/")  # and tests/conftest.py with its kit
BESIDE = ("benchmarks", "faults")  # folders of programs that tests use, which count as tests
PAGE = "any.md"  # whoever reads such pages sees that they name a file which is gone
TOO_COMMON = {"data"}  # a folder's name that strings have for other reasons
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # how git calls a commit without files

_DOUBLE, _SINGLE = r'"""(?:[^"\\]|\\.|"(?!""))*"""', r"'''(?:[^'\\]|\\.|'(?!''))*'''"
_LITERAL = re.compile(
    r"\#[^\n]*|getLogger\([^)]*\)"  # a logger is called after a package, which it does not need
    rf"|(?:\A|:[ \t]*(?:\#[^\n]*)?\n)\s*[rR]?{_DOUBLE}"  # a docstring
    rf"""|(?P<text>{_DOUBLE}|{_SINGLE}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""",
    re.DOTALL,
)
_SPACE = re.compile(r"\s")
_GLOB = re.compile(r"""\.(r?)glob\(["'](\*\.\w+)["']\)""")
_SNAPSHOT = re.compile(r"(?P<folder>.+)/__snapshots__/(?P<test>test_\w+)/")


def literals(source: str) -> list[str]:
    """Return the strings of a module in order, without docstrings, comments and the names of loggers."""
    return [match["text"].strip("\"'") for match in _LITERAL.finditer(source) if match["text"]]


def walk(start: Iterable[str], *edges: Mapping[str, set[str]]) -> set[str]:
    """Return what can be reached from `start` along edges of any kind, with `start` itself."""
    seen = set(start)
    ahead = list(seen)
    while ahead:
        place = ahead.pop()
        new = set().union(*(kind.get(place, ()) for kind in edges)) - seen
        seen |= new
        ahead += new
    return seen


class Names:
    """The modules and programs that strings of a source name."""

    def __init__(self, files: Mapping[str, str], code: str, tests: Iterable[str]) -> None:
        self.files = files
        self.code = code
        self.by_file_name = defaultdict[str, list[str]](list)
        for module, file in files.items():
            self.by_file_name[PurePosixPath(file).name].append(module)
        root = f"(?:{'|'.join([code, *tests])})"
        self._dotted = re.compile(rf"\b{root}(?:\.\w+)+")
        self._prefix = re.compile(rf"{root}\.(?:\w+\.)*(?=\{{|$)")
        self._from = re.compile(rf"from ({root}[\w.]*) import ([\w, ]+)")
        self._import = re.compile(rf"(?:import|from) {code}\b(?!\.)")
        self._program = re.compile(rf"""(?:-m |run_module\(["'])({root}[\w.]*)""")
        self._script = re.compile(rf"""(?i:\bbin|parent)[)}}"]*\s*/\s*"?{code}["\s]""")

    def modules(self, module: str, texts: list[str]) -> Iterator[str]:
        """Yield the modules that strings of a module name, whole or by the beginning of their names."""
        for text in texts:
            if prefix := self._prefix.match(text):
                yield from (other for other in self.files if other.startswith(prefix[0]))
            names = self._dotted.findall(text)
            for package, parts in self._from.findall(text):
                names += [f"{package}.{part.strip()}" for part in parts.split(",")]
            yield from filter(None, map(self._nearest, names))
            if self._import.search(text):
                yield self.code
            if text.endswith(".py"):
                yield from self._at(text, module, texts)

    def programs(self, source: str, texts: list[str]) -> Iterator[str]:
        """Yield the `__main__` of each program that a module starts: by -m, by its name, by its script."""
        is_path = f'/ "{self.code}"' in source or f'/{self.code}"' in source
        names = [self.code] if is_path and self._script.search(source) else []
        for before, text in zip(["", *texts], texts, strict=False):
            names += self._program.findall(text)
            if self._dotted.fullmatch(text) or (text == self.code and before == "-m"):
                names.append(text)
        yield from (main for name in names if (main := f"{name}.__main__") in self.files)

    def _nearest(self, name: str) -> str | None:
        while "." in name and name not in self.files:
            name = name.rpartition(".")[0]
        return name if "." in name else None

    def _at(self, path: str, module: str, texts: list[str]) -> Iterator[str]:
        """Yield the modules with a file of that name which are near, or whose folder the module names too."""
        *folders, name = path.split("/")
        near = {*folders, *texts, PurePosixPath(self.files[module]).parent.name}
        others = self.by_file_name[name]
        for other in others:
            is_only_code = len(others) == 1 and module.startswith(f"{self.code}.")
            if is_only_code or PurePosixPath(self.files[other]).parent.name in near:
                yield other


class Graph:
    """What the modules of a repository and of its tests use.

    Attributes:
        files: the file of each module, relative to the root
        uses: what each module imports and names, and the packages that it is in
        starts: the programs that each module starts as processes of their own
    """

    def __init__(self, root: Path, code: str = "lorad", tests: str = "tests") -> None:
        import grimp  # which a machine without the tools of development lacks

        self.root = root.resolve()
        self.code = code
        self.tests = tests
        self.testing = {tests, *(folder for folder in BESIDE if (self.root / folder).is_dir())}
        imports = grimp.build_graph(code, *sorted(self.testing), cache_dir=None)
        self.files = {module: file for module in sorted(imports.modules) if (file := self._file(module))}
        self.modules = {file: module for module, file in self.files.items()}
        self.sources = {module: (self.root / file).read_text() for module, file in self.files.items()}
        self.texts = {module: literals(source) for module, source in self.sources.items()}
        names = Names(self.files, code, sorted(self.testing))
        self.uses = dict[str, set[str]]()
        self.starts = dict[str, set[str]]()
        for module, texts in self.texts.items():
            uses = imports.find_modules_directly_imported_by(module) | {*names.modules(module, texts)}
            if not self._is_test(module):
                uses.discard(code)  # it offers all of the code when somebody else asks, see `reached_by`
            self.uses[module] = uses.union(self._packages(module)) - {module}
            self.starts[module] = {*names.programs(self.sources[module], texts)} - {module}

    def reached_by(self, test: str) -> set[str]:
        """Return the modules that a test file reaches, its conftests and what they import among them.

        What a module of the code starts is followed where the test or its kit imports that very module. Else
        every test of a screen would reach the daemon, which the program could start if none answered.
        """
        kit = walk([test, *self._conftests(test)], self._among_tests)
        imported = {other for module in kit for other in self.uses[module] if not self._is_test(other)}
        started = {program for module in kit | imported for program in self.starts[module]}
        main = f"{self.code}.__main__"
        # Tests that run the command line in their own process import what the program does.
        if imported & self.uses.get(main, set()):
            started.add(main)
        reached = kit | walk(imported, self.uses) | walk(started, self.uses, self.starts)
        return reached | {self.code} if any(not self._is_test(module) for module in reached) else reached

    def touched_by(self, file: str) -> set[str] | None:
        """Return the modules that change with a file. None: nobody knows what it is for."""
        readers = self._globbing(file)
        if module := self.modules.get(file):
            return {module} | readers
        if place := self._place_of_deleted(file):
            return self._naming(place) | readers | self._globbing(PAGE)
        snapshot = _SNAPSHOT.match(file)
        if snapshot and (test := self.modules.get(f"{snapshot['folder']}/{snapshot['test']}.py")):
            return {test}
        return self._mentioning(file) | readers or None

    @cached_property
    def test_files(self) -> dict[str, str]:
        """The modules of tests by their files."""
        return {file: self.modules[file] for file in self.modules if PurePosixPath(file).match("test_*.py")}

    @cached_property
    def everywhere(self) -> set[str]:
        """What every test gets by the outermost conftest: the modules of tests among it."""
        return walk([f"{self.tests}.conftest"], self._among_tests)

    @cached_property
    def _tests(self) -> list[str]:
        return [module for module in self.files if self._is_test(module)]

    @cached_property
    def _among_tests(self) -> dict[str, set[str]]:
        return {module: {*filter(self._is_test, self.uses[module])} for module in self._tests}

    @cached_property
    def _words(self) -> dict[str, set[str]]:
        """The parts of each module's strings that may be paths."""
        paths = {
            module: [text for text in texts if not _SPACE.search(text)]
            for module, texts in self.texts.items()
        }
        return {
            module: {word for text in texts for word in text.split("/")} for module, texts in paths.items()
        }

    @cached_property
    def _globs(self) -> dict[str, list[tuple[str, str]]]:
        """The patterns by which modules of tests look for files, each with an "r" if in all folders below."""
        return {module: _GLOB.findall(self.sources[module]) for module in self._tests}

    @cached_property
    def _links(self) -> dict[str, str]:
        """The folders outside of the code that are linked into it, with their packages."""
        links = [path for path in (self.root / self.code).iterdir() if path.is_symlink()]
        return {path.resolve().name: f"{self.code}.{path.name}" for path in links}

    def _is_test(self, module: str) -> bool:
        return module.partition(".")[0] in self.testing

    def _file(self, module: str) -> str | None:
        place = self.root.joinpath(*module.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path.resolve().relative_to(self.root).as_posix()
        return None

    def _packages(self, module: str) -> Iterator[str]:
        """Yield the packages that a module is in, without that of all code."""
        parts = module.split(".")
        names = (".".join(parts[:length]) for length in range(1, len(parts)))
        return (name for name in names if name in self.files and name != self.code)

    def _conftests(self, test: str) -> Iterator[str]:
        for package in (test.rsplit(".", count)[0] for count in range(1, test.count(".") + 1)):
            if package != self.tests and (conftest := f"{package}.conftest") in self.files:
                yield conftest

    def _place_of_deleted(self, file: str) -> str | None:
        """Return the name of the module that was in a file; nothing where it still is, or never was."""
        room, _, rest = file.removesuffix(".py").partition("/")
        if room not in {self.code, *self.testing, *self._links} or not file.endswith(".py"):
            return None
        if (self.root / file).exists():
            return None
        return f"{self._links.get(room, room)}.{rest.replace('/', '.')}".removesuffix(".__init__")

    def _globbing(self, file: str) -> set[str]:
        """Return the modules of tests that find a file by its suffix."""
        path = PurePosixPath(file)
        return {
            module
            for module, globs in self._globs.items()
            if any(path.match(pattern) and ("/" in file or not below) for below, pattern in globs)
        }

    def _naming(self, place: str) -> set[str]:
        """Return the modules whose source has the name of a module and that of its package."""
        package, _, name = place.rpartition(".")
        if name == "conftest":
            return {module for module in self._tests if module.startswith(f"{package}.")}
        words = [re.compile(rf"\b{re.escape(word)}\b") for word in (package, name)]
        return {
            module for module, source in self.sources.items() if all(word.search(source) for word in words)
        }

    def _mentioning(self, file: str) -> set[str]:
        """Return the modules whose strings have the name of a file or of its folder.

        Files outside of the code are read by tests alone: elsewhere a page of docs is a hint for users.
        """
        path = PurePosixPath(file)
        is_code = path.parts[0] in {self.code, *self._links}
        readers = self.files if is_code else self._tests
        by_name = {module for module in readers if path.name in self._words[module]}
        if path.suffix == ".tcss":
            by_name |= {
                module for near, module in self.modules.items() if PurePosixPath(near).parent == path.parent
            }
        if is_code and by_name:
            return by_name
        folders = {*path.parts[:1], path.parent.name} - {self.code, *self.testing, *self._links, *TOO_COMMON}
        if path.parent == PurePosixPath():
            return by_name
        return by_name | {module for module in readers if folders & self._words[module]}


def git(root: Path, *words: str) -> list[str] | None:
    """Return what git lists, below `root` and relative to it; None where it fails."""
    command = ["git", "--no-optional-locks", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return re.split(r"[\0\n]", done.stdout.rstrip("\0\n")) if done.returncode == 0 else None


def changed_files(root: Path, commit: str = "") -> set[str]:
    """Return the files that differ from a commit: changed, new or deleted, committed or not.

    commit: empty stands for the last one that HEAD and main have in common, and for the one before HEAD where
    nothing differs from that.

    Raises pytest.UsageError where git knows no such commit.
    """

    def differing(base: str) -> set[str]:
        listed = git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", base, "--")
        new = git(root, "ls-files", "--others", "--exclude-standard", "-z")
        if listed is None or new is None:
            raise pytest.UsageError(f"--changed: git knows no commit {base!r}; write --changed=COMMIT")
        return {*listed, *new} - {""}

    if commit:
        return differing(commit)
    bases = (
        git(root, "merge-base", "HEAD", "origin/main") or git(root, "merge-base", "HEAD", "main") or ["HEAD"]
    )
    return differing(bases[0]) or differing("HEAD~1" if git(root, "rev-parse", "HEAD~1") else EMPTY_TREE)


@dataclass(frozen=True)
class Selection:
    """Which test files are left out.

    Attributes:
        ignored: files of tests that the change does not reach, and folders that have no others
        reached: how many files of tests it reaches
        line: all of it in words
    """

    ignored: frozenset[str]
    reached: int
    line: str


def select(root: Path, files: set[str], code: str = "lorad", tests: str = "tests") -> Selection:
    """Select the files of tests that a change of `files` reaches, and those that are in no package."""
    present = {path.relative_to(root).as_posix() for path in (root / tests).rglob("test_*.py")}
    try:
        reached = present - idle_files(root, files, code, tests)
        why = ""
    except ConcernsAllError as error:
        reached = present
        why = f", as {error} may concern all"
    line = f"changed files: {len(files)}; test files that they reach: {len(reached)} of {len(present)}{why}"
    ignored = present - reached | folders_of(present) - folders_of(reached)
    return Selection(frozenset(ignored), len(reached), line)


class ConcernsAllError(Exception):
    """A change of this file may change what any test does."""


def idle_files(root: Path, files: set[str], code: str, tests: str) -> set[str]:
    """Return the files of tests that a change does not reach. Raises ConcernsAllError."""
    from grimp.exceptions import SourceSyntaxError

    for file in sorted(files):
        if file.startswith(CONCERNS_ALL) or (root / file).is_symlink():
            raise ConcernsAllError(file)
    try:
        graph = Graph(root, code, tests)
    except SourceSyntaxError as error:
        raise ConcernsAllError(error.filename) from error
    changed = set[str]()
    for file in sorted(files):
        modules = graph.touched_by(file)
        if modules is None or modules & graph.everywhere:
            raise ConcernsAllError(file)
        changed |= modules
    return {file for file, test in graph.test_files.items() if not graph.reached_by(test) & changed}


def folders_of(files: Iterable[str]) -> set[str]:
    """Return all folders that files are in, at any depth."""
    return {folder.as_posix() for file in files for folder in PurePosixPath(file).parents}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add `--changed`, and the hooks that it needs."""
    about = "run only what a change can reach: of files that differ from main, or from COMMIT"
    parser.addoption("--changed", nargs="?", const="", metavar="COMMIT", help=about)
    pluginmanager.register(Changed())


class Changed:
    """The hooks of `--changed`, which do nothing without it. Workers are told what to ignore."""

    def __init__(self) -> None:
        self.selection: Selection | None = None
        self.ignored: frozenset[str] = frozenset()

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        """Select before workers are started, of which no more are needed than there are files."""
        if config.option.changed is None or hasattr(config, "workerinput"):
            return
        self.selection = select(config.rootpath, changed_files(config.rootpath, config.option.changed))
        self.ignored = self.selection.ignored
        workers = config.getoption("numprocesses", None)
        if isinstance(workers, int) and config.option.dist == "loadfile":
            config.option.numprocesses = min(workers, self.selection.reached)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["changed"] = sorted(self.ignored)

    def pytest_configure(self, config: pytest.Config) -> None:
        self.ignored |= {*getattr(config, "workerinput", {}).get("changed", ())}

    def pytest_report_header(self) -> str | None:
        return self.selection.line if self.selection else None

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Leave out what is not reached, before it is imported. What the command line names always runs."""
        if not self.ignored or not collection_path.is_relative_to(config.rootpath):
            return None
        return collection_path.relative_to(config.rootpath).as_posix() in self.ignored or None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        if self.selection and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            rest = f": of the {self.selection.reached} files that it reaches none is run here"
            terminalreporter.write_line(
                "no test is reached by this change" + rest * bool(self.selection.reached)
            )

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A change that reaches no test is no failure."""
        if self.selection and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
