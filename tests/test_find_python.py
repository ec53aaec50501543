"""`.ci/find-python` takes the newest usable Python, and says what this distribution has where none is."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.world import REPOSITORY


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory of programs, the only one that is searched beside those of the system."""
    return tmp_path


def program(programs: Path, name: str, *lines: str) -> None:
    path = programs / name
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)


def python(programs: Path, name: str, version: str) -> None:
    """This interpreter under another name, which says that it is another version."""
    code = f"import sys; sys.version_info = {tuple(map(int, version.split('.')))}; exec(sys.argv[1])"
    program(programs, name, f"exec {sys.executable} -c '{code}' \"$2\"")


def find(programs: Path, names: str = "", *before: Path) -> subprocess.CompletedProcess[str]:
    """What it prints where these places are searched before those of the system."""
    path = ":".join(map(str, (*before, programs, "/usr/bin", "/bin")))
    argv, env = [str(REPOSITORY / ".ci" / "find-python")], {"PATH": path}
    return subprocess.run(argv, env=env | {"PYTHON": names}, capture_output=True, text=True, check=False)


def test_newest_usable_python_is_taken(programs: Path) -> None:
    for name, version in (("python3.14", "3.14.0"), ("python3.13", "3.13.1"), ("python3", "3.15.0")):
        python(programs, name, version)
    assert find(programs).stdout == f"{programs}/python3.14\n"
    python(programs, "python3.14", "3.10.2")
    assert find(programs).stdout == f"{programs}/python3.13\n"


def test_pyenv_comes_last_of_one_version(programs: Path) -> None:
    shims, folder = programs / ".pyenv" / "shims", programs / "a folder"
    for place in (shims, folder):
        place.mkdir(parents=True)
        python(place, "python-of-two", "3.14.0")
    assert find(programs, "python-of-two", shims, folder).stdout == f"{folder}/python-of-two\n"
    (folder / "python-of-two").unlink()
    assert find(programs, "python-of-two", shims, folder).stdout == f"{shims}/python-of-two\n"


def test_refusal_names_what_the_distribution_has(programs: Path) -> None:
    python(programs, "old", "3.9.2")
    python(programs, "new", "3.15.0")
    program(programs, "apt-cache", 'case "$3" in *3??13-venv?) echo python3.13-venv - a module;; esac')
    refused = find(programs, "old new")
    assert refused.returncode == 1 and refused.stdout == ""
    assert f"{programs}/old is Python 3.9, which is too old" in refused.stderr
    assert f"{programs}/new is Python 3.15, which is too new" in refused.stderr
    assert "apt install python3.13-venv" in refused.stderr and "python3.11" not in refused.stderr
