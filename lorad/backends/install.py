"""Install SGLang, vLLM or Megatron, each in an environment of its own.

    python -m lorad.backends.install PREFIX KIND...

installs them for CPUs and prints LORAD_<KIND>_PYTHON=<interpreter> for each kind; all else goes to stderr. An
interpreter that this variable names already is taken as it is, and ENGINES_PYTHON names the one that
environments are made of. TORCH_INDEX_URL names an index for torch alone. Imports the standard library alone,
see `lorad/backends/recipes.py`.
"""

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lorad.backends.recipes import CPU_TORCH, Recipe, recipe_of
from lorad.box.paths import refuse_open
from lorad.errors import LoradError, SpecError, StorageError
from lorad.files import expanded, remove_tree, write_whole

READY = ".ready"
"""The file that is written last: an environment without it is half of one."""
_CUDA = "13.0"  # what the driver must have for the torch of the pins for GPUs
_ROOM = 1.15  # of the disk, times what is installed
_USABLE = "import ensurepip, ssl, sys; print('%d.%d' % sys.version_info[:2])"
_PIP = {"PIP_QUIET": "2", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
_SOURCES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "PIP_NO_INDEX",
}
"""Settings of pip that say where packages come from, as variables for uv, which reads none of pip's."""
_LINES = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY", "default-timeout": "UV_HTTP_TIMEOUT"}
"""Those that say how they come."""


def main() -> None:
    prefix = expanded(sys.argv[1]).absolute()
    try:
        for kind in sys.argv[2:]:
            name = f"LORAD_{kind.upper()}_PYTHON"
            python = os.environ.get(name)
            if not python:
                recipe = recipe_of(kind, "cpu")
                install(recipe, prefix, plan(recipe, prefix, os.environ.get("ENGINES_PYTHON")))
                python = str(prefix / recipe.name / "bin/python")
            print(f"==> {kind}: {python}", file=sys.stderr)
            print(f"{name}={python}", flush=True)
    except LoradError as error:
        sys.exit(error.in_full)


def plan(recipe: Recipe, prefix: Path, python: str | None = None) -> dict[str, str]:
    """Map the steps of an installation in `prefix` to their commands; {} where the backend is installed.

    python: the interpreter that the environment is made of; None looks for one.

    Raises SpecError for an interpreter or a driver that does not fit, NotAllowed for a prefix that others may
    write to, and StorageError for a disk without room.
    """
    venv = prefix / recipe.name
    if prefix.exists():
        refuse_open(prefix)
    if _is_ready(venv):
        return {}
    if recipe.device == "cu":
        try:
            printed = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
        except OSError:
            printed = ""
        match = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", printed)
        if match is None or float(match[1]) < float(_CUDA):
            driver = f"driver is for CUDA {match[1]}" if match else "nvidia-smi names no driver"
            raise SpecError(
                f"{recipe.kind} {recipe.version} is installed with a torch for CUDA {_CUDA}, and this "
                f"machine's {driver}",
                hint="Install a newer driver of NVIDIA; without a GPU: --cpu. An environment of your own, "
                f"with a torch that the driver takes, is named by `lorad backends use {recipe.kind} PYTHON`.",
            )
    base = _find_python(recipe, prefix, python)
    existing = next(path for path in (prefix, *prefix.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < recipe.gigabytes * _ROOM:
        raise StorageError(
            f"{recipe.kind} needs {recipe.gigabytes * _ROOM:.1f} GB, and {existing} has {free:.1f} GB free",
            hint="Make room there, or name another disk: --prefix DIR.",
        )
    env = _environment()
    index = os.environ.get("TORCH_INDEX_URL", "")
    if recipe.device == "cpu" and not env.keys() & {*_SOURCES.values(), "UV_INDEX_URL", "UV_INDEX"}:
        index = index or CPU_TORCH
    pip = ""
    if uv := shutil.which("uv"):
        pip = f"{shlex.quote(uv)} pip install -q --python {shlex.quote(f'{venv}/bin/python')}"
        pip += " --no-index" if "PIP_NO_INDEX" in env else ""
    return recipe.steps(venv, base, pip=pip, torch_index=index)


def install(recipe: Recipe, prefix: Path, steps: Mapping[str, str]) -> None:
    """Do the steps of a plan, unless another process did them meanwhile. Raises LoradError.

    An environment that was broken off is removed before.
    """
    if not steps:
        return
    if os.geteuid() == 0:
        os.umask(0o022)  # everybody on the box may use what root installs
    prefix.mkdir(parents=True, exist_ok=True)
    refuse_open(prefix)
    venv = prefix / recipe.name
    env = _environment()
    with alone(prefix) as lock:
        if _is_ready(venv):
            return
        remove_tree(venv)
        for number, (title, command) in enumerate(steps.items(), start=1):
            print(f"==> {recipe.kind}, step {number} of {len(steps)}: {title}", file=sys.stderr, flush=True)
            # the step inherits the lock: if it outlives this process, nobody else begins
            done = subprocess.run(["sh", "-c", command], stdout=sys.stderr, env=env, pass_fds=(lock,))
            if done.returncode:
                raise LoradError(
                    f"{recipe.kind}: {title}: the command ended with {done.returncode}: {command}",
                    hint="What it printed says why. To begin anew, call the same again.",
                )
        if os.geteuid() == 0:  # the cache of uv, whose files these are, may be of a stricter umask
            subprocess.run(["chmod", "-R", "a+rX", str(venv)], check=True)
        write_whole(venv / READY, b"", mode=0o644)


@contextlib.contextmanager
def alone(prefix: Path) -> Iterator[int]:
    """Hold the lock of a prefix, and yield its descriptor."""
    with open(prefix / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"==> waiting for another process that works in {prefix}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _is_ready(venv: Path) -> bool:
    """Return whether an environment is whole, and the Python that it was made of is still there."""
    return (venv / READY).exists() and (venv / "bin/python").exists()


def uv_settings() -> dict[str, str]:
    """Return the variables by which uv has the sources and certificates of pip; others' values stay."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout  # nothing where it has no pip
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "true"}
    for section in ("global", "install", ":env:"):  # the last one wins
        for name, value in re.findall(rf"(?m)^{section}\.([\w-]+)='(.*)'$", listed):
            if variable := (_SOURCES | _LINES).get(name):
                places = value.replace("\\n", " ").split()
                settings[variable] = ("," if name == "find-links" else " ").join(places)
    return {name: value for name, value in settings.items() if name not in os.environ}


def _environment() -> dict[str, str]:
    return uv_settings() | os.environ | _PIP


def _find_python(recipe: Recipe, prefix: Path, named: str | None) -> str:
    """Return an interpreter that the recipe is for, and warn root of one that other users cannot start.

    Where lorad's own was installed is looked at before PATH: who can start lorad can start that. Raises
    SpecError where this machine has none, or the named one is another.
    """
    names = [named] if named else [*(f"python{version}" for version in recipe.pythons), sys.executable]
    places = os.pathsep.join([f"{sys.base_prefix}/bin", os.environ.get("PATH", os.defpath)])
    for path in filter(None, (shutil.which(name, path=places) for name in names)):
        done = subprocess.run([path, "-c", _USABLE], capture_output=True, text=True)
        if done.stdout.strip() not in recipe.pythons:
            continue
        if os.geteuid() == 0 and (home := expanded("~")) in Path(path).parents and home not in prefix.parents:
            print(f"==> note: other users cannot enter {home}, where {path} is", file=sys.stderr)
        return path
    first = f"python{recipe.pythons[0]}"
    raise SpecError(
        f"{recipe.kind} needs Python {' or '.join(recipe.pythons)} with its venv module, and "
        f"{f'{named} is not that' if named else 'this machine has none'}",
        hint=f"Install it (on Debian and Ubuntu: apt install {first} {first}-venv), or name it: --python "
        "PATH.",
    )


if __name__ == "__main__":
    main()
