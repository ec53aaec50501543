"""Install SGLang, vLLM or Megatron, each in an environment of its own.

    python -m lorad.backends.install [--prefix DIR] [--python PATH] KIND...

Prints LORAD_<KIND>_PYTHON=<interpreter> for each kind; all else goes to stderr. An interpreter that this
variable names already is taken as it is. TORCH_INDEX_URL names an index for torch alone. Imports the standard
library alone, see `lorad/backends/recipes.py`.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lorad import __version__
from lorad.backends.recipes import CPU_TORCH, CUDA, KINDS, PREFIX, Recipe, Step, recipe_of
from lorad.box.paths import refuse_open
from lorad.errors import LoradError, SpecError, StorageError
from lorad.files import expanded, remove_tree, write_whole

READY = ".ready"
"""Written last, so that an environment without it is half of one."""
_ROOM = 1.15  # times what it takes
_USABLE = "import ensurepip, ssl, sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)"
_PIP = {"PIP_QUIET": "2", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
_Say = Callable[[str], None]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lorad.backends.install")
    parser.add_argument("kinds", nargs="+", choices=KINDS, metavar="KIND")
    parser.add_argument("--prefix", type=Path, default=Path(PREFIX))
    parser.add_argument("--python")
    arguments = parser.parse_args()
    try:
        for kind in arguments.kinds:
            name = f"LORAD_{kind.upper()}_PYTHON"
            python = os.environ.get(name) or install(
                recipe_of(kind, "cpu"), expanded(arguments.prefix), _say, python=arguments.python
            )
            _say(f"{kind}: {python}")
            print(f"{name}={python}")
    except LoradError as error:
        sys.exit(f"{error.message}\n{error.hint}")


def _say(text: str) -> None:
    print(f"==> {text}", file=sys.stderr, flush=True)


def install(recipe: Recipe, prefix: Path, say: _Say, *, python: str | None = None) -> Path:
    """Return the interpreter of a backend in `prefix`, where it is installed unless it is there.

    say: hears what is being done.
    python: the interpreter that the environment is made of; None looks for one.

    What was broken off is removed first. Raises SpecError for an interpreter or a driver that does not fit,
    NotAllowed for a prefix that others may write to, StorageError for a full disk, and LoradError where a
    step fails.
    """
    venv = prefix / recipe.name
    if prefix.exists():
        refuse_open(prefix)
    if not is_ready(venv):
        check_driver(recipe)
        base, minor = find_python(recipe, python)
        check_room(recipe, prefix)
        prefix.mkdir(parents=True, exist_ok=True)
        refuse_open(prefix)
        with _alone(prefix, say) as lock:
            if not is_ready(venv):  # else another process did it meanwhile
                say(f"{recipe.kind}: installing into {venv} (Python 3.{minor}; some minutes)")
                remove_tree(venv)
                for step in recipe.steps(str(venv), base, minor, torch_index=torch_index(recipe)):
                    say(f"{recipe.kind}: {step.says}")
                    _run(step, venv, lock)
                about = {"lorad": __version__, "device": recipe.device, "version": recipe.version}
                write_whole(venv / READY, json.dumps(about).encode(), mode=0o644)
    return venv / "bin/python"


def is_ready(venv: Path) -> bool:
    """Return whether an environment is whole, and its Python starts."""
    if not (venv / READY).exists():
        return False
    with contextlib.suppress(OSError):
        return subprocess.run([venv / "bin/python", "-c", ""], capture_output=True).returncode == 0
    return False


@contextlib.contextmanager
def _alone(prefix: Path, say: _Say) -> Iterator[int]:
    """Hold the lock of a prefix, whose descriptor the steps inherit: what is left of an installation that was
    killed keeps it.
    """
    with open(prefix / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another installation into {prefix}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _run(step: Step, venv: Path, lock: int) -> None:
    """Run a step, with uv in the place of pip where there is one."""
    argv = step.argv
    env = os.environ | _PIP
    if argv[1:4] == ["-m", "pip", "install"] and (uv := shutil.which("uv")):
        argv = [uv, "pip", "install", "-q", "--python", argv[0], *_for_uv(venv, argv), *argv[4:]]
        if certificates := _pip_settings(venv).get("cert"):
            env |= {"SSL_CERT_FILE": certificates}
    try:
        code = subprocess.run(argv, stdout=sys.stderr.fileno(), env=env, pass_fds=(lock,)).returncode
    except OSError as error:
        raise LoradError(f"{step.argv[0]}: {error.strerror}", hint=step.hint) from None
    if code:
        raise LoradError(f"{step.says}: the command ended with {code}", hint=step.hint)


def _for_uv(venv: Path, argv: Sequence[str]) -> list[str]:
    """Return pip's settings of where packages come from as arguments of uv, which reads none of them, but for
    those that stand in `argv`.

    As pip does, uv then takes the best version of all indexes.
    """
    settings = _pip_settings(venv)
    arguments = ["--index-strategy", "unsafe-best-match"]
    for name in ("index-url", "extra-index-url", "find-links"):
        for value in [] if f"--{name}" in argv else settings.get(name, "").split():
            arguments += [f"--{name}", value]
    return [*arguments, "--no-index"] if settings.get("no-index", "0") in ("1", "true", "True") else arguments


def _pip_settings(venv: Path | None = None) -> Mapping[str, str]:
    """Return what pip is told: by its files, there for installing, and in the environment, which wins."""
    python = str(venv / "bin/python") if venv else sys.executable
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = {}
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"(?m)^{section}\.([\w-]+)='(.*)'$", listed):
            settings[name] = value.replace("\\n", " ")
    return settings


def torch_index(recipe: Recipe) -> str:
    """Return the index that torch comes from: PyTorch's own for CPUs, unless pip is told where packages are.

    "" is where all packages come from.
    """
    if named := os.environ.get("TORCH_INDEX_URL"):
        return named
    has_own = {"index-url", "extra-index-url", "find-links", "no-index"} & {*_pip_settings()}
    return "" if has_own or recipe.device != "cpu" else CPU_TORCH


def find_python(recipe: Recipe, named: str | None = None) -> tuple[str, int]:
    """Return an interpreter that the recipe was tried with, and the minor version of its Python 3.

    Raises SpecError where there is none, or the one named is another.
    """
    names: Sequence[str] = [f"python3.{minor}" for minor in recipe.minors] + [sys.executable]
    for name in [named] if named else names:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "-c", _USABLE], capture_output=True, text=True)
        if done.returncode == 0 and int(done.stdout) in recipe.minors:
            return path, int(done.stdout)
    tried = " or ".join(f"3.{minor}" for minor in recipe.minors)
    first = f"python3.{recipe.minors[0]}"
    where = f"{named} is none" if named else "there is none here"
    raise SpecError(
        f"{recipe.kind} was tried on Python {tried}, with its venv module, and {where}",
        hint=f"Install it (on Debian and Ubuntu: apt install {first} {first}-venv; with uv: uv python "
        f"install 3.{recipe.minors[0]}), or name another: --python /path/to/{first}.",
    )


def check_driver(recipe: Recipe) -> None:
    """Raise SpecError where this machine's driver is too old for the torch that would be installed."""
    if recipe.device == "cpu":
        return
    try:
        printed = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    except OSError:
        printed = ""
    match = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+)\.(\d+)", printed)
    if match is None:
        raise SpecError(
            "nvidia-smi names no CUDA of the driver",
            hint="Is NVIDIA's driver installed? Without a GPU: --cpu.",
        )
    version = int(match[1]), int(match[2])
    if version < CUDA:
        raise SpecError(
            f"this machine's driver is for CUDA {match[1]}.{match[2]}, and {recipe.kind} {recipe.version} is "
            f"installed with a torch for CUDA {CUDA[0]}.{CUDA[1]}",
            hint="Install a newer driver; or make an environment yourself with a torch that the driver "
            f"takes, and name it: `lorad backends use {recipe.kind} PYTHON`.",
        )


def check_room(recipe: Recipe, prefix: Path) -> int:
    """Return the free bytes where the backend goes. Raises StorageError where they are too few."""
    existing = next(path for path in (prefix, *prefix.parents) if path.exists())
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    if free < recipe.bytes * _ROOM:
        needed = recipe.bytes * _ROOM / 1e9
        raise StorageError(
            f"{recipe.kind} needs {needed:.1f} GB, and {free / 1e9:.1f} GB are free in {existing}",
            hint="Make room there, or name another disk: --prefix DIR.",
        )
    return free


if __name__ == "__main__":
    main()
