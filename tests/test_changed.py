"""`--changed` runs what a change can reach, and nothing that it cannot."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.suite import changed
from tests.kit.suite.changed import Graph, changed_files, literals, select

REPOSITORY = Path(__file__).parents[1]
Reached = Callable[..., set[str]]

PAGES = '"*.md"'  # apart from glob: else this file would count as one that reads pages

# A code of two rooms, one of which is a link, and its tests.
SHOP = {
    "shop/__init__.py": "def __getattr__(name): return importlib.import_module('shop.till')",
    "shop/__main__.py": "import shop.desk.bell",
    "shop/price.py": "import shop",
    "shop/till.py": "def pay():\n    from shop.price import tax",
    "shop/page.py": "import shop.sign\nlog = logging.getLogger('shop.price')  # as in shop.till",
    "shop/sign.py": '"""See shop.till."""\ncommand = [python, "-m", "shop"]',
    "shop/plugins.py": 'KINDS = {"a": "shop.till:Till"}',
    "desk/__init__.py": "",
    "desk/bell.py": 'import_module(f"shop.desk.{name}")',
    "desk/lamp.py": 'command = [python, "-m", "shop.lane"]',
    "shop/lane/__init__.py": "",
    "shop/lane/__main__.py": "",
    "desk/look.tcss": "",
    "shop_tests/conftest.py": "import shop_tests.kit.clean, shop.plugins",
    "shop_tests/kit/clean.py": "",
    "shop_tests/kit/rows.py": 'ROWS, PROGRAM = HERE / "data" / "rows", HERE.with_name("child.py")',
    "shop_tests/kit/child.py": "",
    "shop_tests/test_price.py": "from shop.price import tax",
    "shop_tests/test_till.py": "from shop import till",
    "shop_tests/test_page.py": "import shop.page",
    "shop_tests/test_kinds.py": "import shop.plugins",
    "shop_tests/test_bell.py": "import shop.sign",
    "shop_tests/test_docs.py": f'(ROOT / "docs").rglob({PAGES})',
    "shop_tests/test_pages.py": f'ROOT.glob({PAGES}), ROOT / "Makefile", ROOT / "desk"',
    "shop_tests/test_script.py": 'command = [BIN / "shop"]',
    "shop_tests/test_shell.py": 'exec("python -m shop")',
    "shop_tests/test_inside.py": "from shop.desk.bell import main",
    "shop_tests/room/conftest.py": "import shop_tests.kit.rows",
    "shop_tests/room/__init__.py": "",
    "shop_tests/room/test_rows.py": "",
    "shop_tests/room/__snapshots__/test_rows/a.svg": "",
    "shop_tests/data/rows/a.json": "",
    "docs/prices.md": "",
    "README.md": "",
    "notes.txt": "",
}
STARTERS = {"test_bell", "test_script", "test_shell", "test_inside"}  # of the shop as a program
TESTS = {Path(name).stem for name in SHOP if Path(name).match("test_*.py")}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path, SHOP)
    (tmp_path / "shop" / "desk").symlink_to("../desk")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def reached(shop: Path) -> Reached:
    """The names of the test files that a change of some files reaches."""

    def of(*files: str) -> set[str]:
        ignored = select(shop, {*files}, "shop", "shop_tests").ignored
        return {path.stem for path in shop.rglob("test_*.py")} - {Path(name).stem for name in ignored}

    return of


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("shop/price.py", {"test_price", "test_till", "test_kinds"}),
        ("shop/till.py", {"test_till", "test_kinds"}),
        ("shop/sign.py", {"test_page", "test_bell"}),
        ("desk/lamp.py", STARTERS),
        ("desk/look.tcss", STARTERS),
        ("shop/lane/__main__.py", STARTERS),
        ("shop_tests/test_price.py", {"test_price"}),
        ("shop_tests/room/__init__.py", {"test_rows"}),
        ("shop_tests/kit/rows.py", {"test_rows"}),
        ("shop_tests/kit/child.py", {"test_rows"}),
        ("shop_tests/data/rows/a.json", {"test_rows"}),
        ("shop_tests/room/__snapshots__/test_rows/a.svg", {"test_rows"}),
        ("docs/prices.md", {"test_docs", "test_pages"}),
        ("README.md", {"test_pages"}),
    ],
)
def test_change_reaches_what_uses_it(reached: Reached, file: str, tests: set[str]) -> None:
    assert reached(file) == tests


def test_changes_reach_what_each_reaches(reached: Reached) -> None:
    assert reached("shop_tests/test_price.py", "README.md") == {"test_price", "test_pages"}
    assert reached() == set()


def test_all_users_reach_the_package_itself(reached: Reached) -> None:
    assert reached("shop/__init__.py") == TESTS - {"test_rows", "test_docs", "test_pages"}


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("shop/price.py", {"test_price", "test_page", "test_till", "test_kinds", "test_pages"}),
        ("desk/bell.py", STARTERS | {"test_pages"}),
        ("shop_tests/room/conftest.py", {"test_rows", "test_pages"}),
        ("shop_tests/test_price.py", {"test_pages"}),
    ],
)
def test_deleted_module_reaches_who_named_it(
    reached: Reached, shop: Path, file: str, tests: set[str]
) -> None:
    (shop / file).unlink()
    assert reached(file) == tests


@pytest.mark.parametrize(
    "file",
    ["Makefile", ".ci/run", "shop_tests/conftest.py", "shop_tests/kit/clean.py", "notes.txt", "shop/desk"],
)
def test_unknown_or_common_file_selects_everything(reached: Reached, shop: Path, file: str) -> None:
    assert reached("shop_tests/test_price.py", file) == TESTS
    assert select(shop, {file}, "shop", "shop_tests").line.endswith(f" 11 of 11, as {file} may concern all")


def test_code_that_does_not_parse_selects_everything(reached: Reached, shop: Path) -> None:
    (shop / "shop" / "price.py").write_text("def")
    assert reached("README.md") == TESTS
    assert "/shop/price.py may concern all" in select(shop, {"README.md"}, "shop", "shop_tests").line


def test_test_outside_of_packages_always_runs(reached: Reached, shop: Path) -> None:
    write(shop, {"shop_tests/no-package/test_alone.py": ""})
    assert reached("README.md") == {"test_pages", "test_alone"}


def test_only_strings_that_work_are_read() -> None:
    source = '''"""A doc."""
x = 1  # "a comment"
def f(x):
    r"""Another."""
    log = getLogger("a.logger")
    return f(f"{x}", 'say "this"', b"#", """
long""", "it\\"s")
'''
    assert literals(source) == ["{x}", 'say "this', "#", "\nlong", 'it\\"s']


def git(root: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *names, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path, *files: str) -> None:
    write(root, dict.fromkeys(files, f"{files}"))
    git(root, "add", ".")
    git(root, "commit", "-m", "a change")


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A repository whose main has two commits."""
    git(tmp_path, "init")
    commit(tmp_path, "a", "b c")
    commit(tmp_path, "d")
    return tmp_path


def test_what_is_not_committed_is_changed(history: Path) -> None:
    (history / "b c").unlink()
    git(history, "mv", "a", "moved")
    write(history, {"new/é": "", "d": "otherwise"})
    assert changed_files(history) == {"a", "b c", "moved", "new/é", "d"}


def test_commits_of_a_branch_are_changed(history: Path) -> None:
    git(history, "switch", "--create", "branch")
    commit(history, "e")
    git(history, "switch", "main")
    commit(history, "f")
    git(history, "switch", "branch")
    write(history, {"g": ""})
    assert changed_files(history) == {"e", "g"}


def test_last_commit_stands_for_no_change(history: Path) -> None:
    assert changed_files(history) == {"d"}


def test_change_since_a_commit_is_asked_for(history: Path) -> None:
    commit(history, "e")
    write(history, {"f": ""})
    assert changed_files(history, "HEAD~2") == {"d", "e", "f"}


def test_what_is_no_commit_is_refused(history: Path) -> None:
    with pytest.raises(pytest.UsageError, match=r"no commit 'tests/rl'; write --changed=COMMIT"):
        changed_files(history, "tests/rl")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with three files of tests, of which two cannot be imported."""
    hooks = Path(changed.__file__).read_text()
    write(tmp_path, dict.fromkeys(["lorad/__init__.py", "lorad/a.py", "lorad/b.py", "tests/__init__.py"], ""))
    write(tmp_path, {"tests/kit/suite/changed.py": hooks, ".gitignore": "__pycache__"})
    write(tmp_path, dict.fromkeys(["tests/kit/__init__.py", "tests/kit/suite/__init__.py"], ""))
    write(tmp_path, {"tests/conftest.py": "from tests.kit.suite.changed import pytest_addoption"})
    write(tmp_path, {"tests/test_a.py": "import lorad.a\ndef test_it(): pass\ndef test_more(): pass"})
    write(tmp_path, {"tests/test_b.py": "import lorad.b, nothing", "tests/room/test_c.py": "import nothing"})
    write(tmp_path, {"tests/room/conftest.py": "import nothing", "tests/room/__init__.py": ""})
    write(tmp_path, {"pytest.ini": "[pytest]\ntestpaths = tests\naddopts = --import-mode=importlib"})
    git(tmp_path, "init")
    commit(tmp_path)
    return tmp_path


def pytest_in(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def test_workers_import_only_what_is_reached(project: Path) -> None:
    write(project, {"lorad/a.py": "changed = True"})
    done = pytest_in(project, "--changed", "-n", "2", "--dist", "loadfile")
    assert "changed files: 1; test files that they reach: 1 of 3" in done.stdout
    assert "1 worker" in done.stdout and "2 passed" in done.stdout and done.returncode == 0, done.stdout


def test_change_without_tests_is_no_failure(project: Path) -> None:
    write(project, {"lorad/unused.py": ""})
    done = pytest_in(project, "--changed=HEAD", "-n", "2", "--dist", "loadfile")
    assert "no test is reached by this change" in done.stdout and done.returncode == 0, done.stdout


def test_nothing_is_left_out_without_it(project: Path) -> None:
    done = pytest_in(project, "tests/test_a.py", "tests/test_b.py")
    assert "changed files" not in done.stdout and "No module named 'nothing'" in done.stdout


@pytest.fixture(scope="module")
def lorad() -> Graph:
    return Graph(REPOSITORY)


def files_reached(graph: Graph, file: str) -> set[str]:
    touched = graph.touched_by(file) or set()
    return {test for test, module in graph.test_files.items() if graph.reached_by(module) & touched}


@pytest.mark.system
def test_advantages_concern_no_board(lorad: Graph) -> None:
    reached = files_reached(lorad, "lorad/rl/advantage.py")
    assert {"tests/rl/test_advantage.py", "tests/end_to_end/test_main_job.py"} <= reached
    assert reached.isdisjoint({"tests/tui/test_board.py", "tests/store/test_database.py"})


@pytest.mark.system
def test_command_concerns_whoever_types_commands(lorad: Graph) -> None:
    reached = files_reached(lorad, "cli/commands/show.py")
    assert {"tests/cli/test_cli.py", "tests/cli/test_completion.py", "tests/tui/test_tmux.py"} <= reached
    assert "tests/rl/test_advantage.py" not in reached


@pytest.mark.system
def test_page_concerns_tests_of_the_docs(lorad: Graph) -> None:
    reached = files_reached(lorad, "docs/cli.md")
    assert {"tests/test_docs.py", "tests/end_to_end/test_docs_run.py"} <= reached
    assert len(reached) < 20
