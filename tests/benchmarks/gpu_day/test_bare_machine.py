"""The day begins on a machine as it is lent: its Python is that of a virtual environment, with torch and
without what lorad wants beside it; there is no make, no pip, no ensurepip, no network, and nothing of lorad
is installed. The versions are lorad's own here; `make test-gpu-day` names a folder with those that a GPU had.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.gpu_day.sizes import SIZES
from benchmarks.gpu_day.stages import STAGES
from benchmarks.gpu_day.targets import TARGETS
from tests.kit.world import REPOSITORY

pytestmark = pytest.mark.system

LACKS = ("msgspec", "typer", "click", "rich", "sqlite-utils", "nvidia-ml-py", "textual", "pytest-asyncio")
TOOLS = ("sh", "dirname", "mktemp", "rm", "env")
IMAGE = os.environ.get("LORAD_GPU_IMAGE")  # of .ci/setup-gpu-image
OFFLINE = (sys.executable, "-I", str(REPOSITORY / "benchmarks" / "gpu_day" / "offline.py"))
CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
WITHOUT_ENSUREPIP = 'import sys\nsys.modules["ensurepip"] = None\n'


def files_of(name: str) -> list[tuple[Path, str]]:
    """Where the files of a distribution are, and their names in a wheel."""
    found = metadata.files(name) or []
    return [(Path(str(file.locate())), str(file)) for file in found if not str(file).startswith("..")]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment made by an environment's Python: links to what that has, but for LACKS."""
    if IMAGE:
        return Path(IMAGE, "python", "bin", "python")
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
    if IMAGE:
        return shutil.copytree(Path(IMAGE, "wheels"), tmp_path / "wheels")
    (tmp_path / "wheels").mkdir()
    for name in LACKS:
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}.whl", "w") as wheel:
            for path, inside in files_of(name):
                wheel.write(path, inside)
    return tmp_path / "wheels"


def gpu_day(python: Path, folder: Path, *options: str, **env: str) -> str:
    """Run the command without a network, with these variables and few tools; returns what it printed."""
    (folder / "bin").mkdir()
    for tool in TOOLS:
        (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))
    env |= {"PATH": str(folder / "bin"), "PYTHON": str(python), "OUT": str(folder / "out")}
    argv = [*OFFLINE, "sh", str(REPOSITORY / ".ci" / "gpu-day"), *options]
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def versions_of_the_gpu() -> dict[str, str]:
    """The versions that the machine with the GPU had, of what the day's facts name."""
    lines = (REPOSITORY / ".ci" / "gpu-image.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    return {name: pins[name] for name in ("torch", "transformers", "peft")}


def test_offline_commands_reach_nobody_outside() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", CONNECT, str(server.getsockname()[1])]
        subprocess.run(command, check=True)
        done = subprocess.run([*OFFLINE, *command], capture_output=True, text=True)
    if "no namespace can be made" in done.stderr:
        pytest.skip("the kernel allows no namespace without a network")
    assert done.returncode == 1 and "ConnectionRefusedError" in done.stderr


def test_path_may_have_the_wheels_unpacked(python: Path, wheels: Path, tmp_path: Path) -> None:
    for wheel in wheels.iterdir():
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert "one GPU in ten minutes" in gpu_day(python, tmp_path, "--help", PYTHONPATH=str(tmp_path / "site"))


def test_every_stage_passes_with_real_figures(python: Path, wheels: Path, tmp_path: Path) -> None:
    """With wheels that it unpacks, also where processes start others: daemon, driver, pool, FSDP's rank."""
    limits = ",".join(f"{stage.name}=500" for stage in STAGES)
    gpu_day(python, tmp_path, "--size", "micro", "--seconds", limits, WHEELS=wheels.name)
    report = json.loads((tmp_path / "out" / "gpu-day" / "report.json").read_text())
    states = {stage["name"]: stage["state"] for stage in report["stages"]}
    assert states == {stage.name: "passed" for stage in STAGES}
    figures = {stage["name"]: stage["figures"] for stage in report["stages"]}
    numbers = [item for found in figures.values() for item in found.items() if isinstance(item[1], float)]
    assert len(numbers) > 50
    assert [item for item in numbers if not ("nats" in item[0] or item[1] > 0)] == []
    assert figures["parity"]["passed"] and not figures["parity"]["failed"]
    assert figures["run"]["steps"] == SIZES["micro"].steps > figures["run"]["killed_at_step"] > 0
    assert figures["run"]["versions_passed"] and figures["fsdp"]["same_after_onload"]
    measured = {target["figure"] for target in report["targets"] if target["found"] is not None}
    only_gpus = {"facts:nobody_before_us", "facts:sees_us", "fsdp:offload_frees_gib"}
    assert measured == {target.figure for target in TARGETS} - only_gpus
    if IMAGE:
        found = {name: figures["facts"][name].partition("+")[0] for name in versions_of_the_gpu()}
        assert found == versions_of_the_gpu()
    assert "Every stage passed" in (tmp_path / "out" / "gpu-day" / "report.md").read_text()
