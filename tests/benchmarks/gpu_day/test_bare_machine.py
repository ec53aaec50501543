"""The day begins on a machine as it is lent: its Python is that of a virtual environment, with torch and
without what lorad wants beside it; there is no make, no pip, no ensurepip, and nothing of lorad is installed.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.kit.world import REPOSITORY

pytestmark = pytest.mark.system

LACKS = ("msgspec", "typer", "click", "rich", "sqlite-utils", "nvidia-ml-py", "textual", "pytest-asyncio")
TOOLS = ("sh", "dirname", "mktemp", "rm", "env")
WITHOUT_ENSUREPIP = 'import sys\nsys.modules["ensurepip"] = None\n'


def files_of(name: str) -> list[tuple[Path, str]]:
    """Where the files of a distribution are, and their names in a wheel."""
    found = metadata.files(name) or []
    return [(Path(str(file.locate())), str(file)) for file in found if not str(file).startswith("..")]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment made by an environment's Python: links to what that has, but for LACKS."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    lacking = {name.partition("/")[0] for each in LACKS for _, name in files_of(each)}
    for entry in Path(pytest.__file__).parents[1].iterdir():
        if entry.name not in lacking and entry.suffix != ".pth" and "lorad" not in entry.name:
            (site / entry.name).symlink_to(entry)
    (site / "sitecustomize.py").write_text(WITHOUT_ENSUREPIP)
    return tmp_path / "venv" / "bin" / "python"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    for name in LACKS:
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}.whl", "w") as wheel:
            for path, inside in files_of(name):
                wheel.write(path, inside)
    return tmp_path / "wheels"


@pytest.mark.parametrize(
    ("unpacked", "stages"), [(False, ["facts", "parity"]), (True, ["model", "run", "fsdp"])], ids=str
)
def test_day_wants_only_python_and_wheels(
    python: Path, wheels: Path, tmp_path: Path, *, unpacked: bool, stages: list[str]
) -> None:
    """Also where processes start processes: daemon, driver, pool, and the rank of FSDP."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    env = {"PATH": str(tmp_path / "bin"), "PYTHON": str(python), "OUT": str(tmp_path / "out")}
    if unpacked:
        for wheel in wheels.iterdir():
            zipfile.ZipFile(wheel).extractall(tmp_path / "site")
        env["PYTHONPATH"] = str(tmp_path / "site")
    else:
        env["WHEELS"] = "wheels"
    options = ["--stages", ",".join(stages), "--seconds", ",".join(f"{name}=500" for name in stages)]
    done = subprocess.run(
        ["sh", str(REPOSITORY / ".ci" / "gpu-day"), "--size", "micro", *options],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "gpu-day" / "report.json").read_text())
    assert [stage["state"] for stage in report["stages"]] == ["passed"] * len(stages)
