"""How SGLang, vLLM and Megatron are installed: the steps that hints print and `lorad backends install` runs.

Imports the standard library alone: CI installs backends before lorad's own environment is there.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lorad.box.paths import checkout
from lorad.errors import SpecError

KINDS = ("sglang", "vllm", "megatron")
_NVIDIA = Path("/proc/driver/nvidia/version")
PREFIX = "~/venvs"
_PINS = Path(__file__).parent / "pins"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
CUDA = (13, 0)  # what the driver must have for the torch of the pins for GPUs
_GIGABYTES = {"vllm-cpu": 3.4, "sglang-cpu": 2.5, "megatron-cpu": 2.0}  # as measured
_ON_GPUS = 10.0  # an estimate
_INSTEAD = {
    "sglang": ("rollout.backend: vllm, which has a build for CPUs", "lorad backends install vllm"),
    "megatron": ("trainer.backend: fsdp, which is installed with lorad", "lorad doctor --trainer fsdp"),
}
"""What a CPU without lorad's source tree has instead, and its command."""


@dataclass(frozen=True)
class Step:
    """One command of an installation.

    Attributes:
        says: what it does, for whoever waits.
        argv: the command.
        hint: what to do where it fails.
    """

    says: str
    argv: list[str]
    hint: str = "What it printed says why. The same command begins anew."


@dataclass(frozen=True)
class Recipe:
    """How one backend is installed for one device.

    Attributes:
        kind: the backend.
        device: `cpu`, or `cu` for GPUs of _NVIDIA.
        tree: lorad's source tree, whose tests have what a CPU lacks; None without it, and for GPUs.
    """

    kind: str
    device: str
    tree: Path | None = None

    @property
    def file(self) -> Path:
        """Return the file of the pins."""
        return _PINS / f"{self.kind}-{self.device}.txt"

    @property
    def pins(self) -> list[str]:
        """List what is installed. vLLM's torchvision is left out where nothing makes it work."""
        lines = [line for line in self.file.read_text().splitlines() if line and line[0] != "#"]
        is_whole = self.device == "cu" or self.tree is not None
        return [line for line in lines if is_whole or not line.startswith("torchvision")]

    @property
    def name(self) -> str:
        """Return the name of its directory, by the digest of its pins."""
        text = "".join(f"{line}\n" for line in self.pins)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def version(self) -> str:
        """Return the version of the backend itself."""
        distribution = "megatron-bridge" if self.kind == "megatron" else f"{self.kind}(?:-cpu)?"
        return next(
            match[1] for line in self.pins if (match := re.fullmatch(rf"{distribution}==(\S+)", line))
        )

    @property
    def bytes(self) -> int:
        """Return the bytes that it takes on disk."""
        return int(_GIGABYTES.get(f"{self.kind}-{self.device}", _ON_GPUS) * 10**9)

    @property
    def minors(self) -> tuple[int, ...]:
        """Return the minor versions of Python 3 that it was tried with, the usual one first."""
        if self.kind == "megatron":
            return (11, 12) if self.device == "cpu" else (12,)
        return (11,) if self.device == "cpu" else (12, 11, 13)

    @property
    def env(self) -> dict[str, str]:
        """Return the variables of its processes, for `config.yaml`: where what a CPU lacks comes from."""
        if self.tree is None:
            return {}
        servers = (f"engines/real/{self.kind}_cpu", "engines/real/servers_cpu")
        places = ("trainers/real/megatron_cpu",) if self.kind == "megatron" else servers
        return {"PYTHONPATH": os.pathsep.join(f"{self.tree}/tests/{place}" for place in places)}

    def entry(self, python: str) -> str:
        """Return its value of `backends` in config.yaml."""
        env = ", ".join(f"{name}: {value}" for name, value in self.env.items())
        return f"{{python: {python}, env: {{{env}}}}}" if env else f"{{python: {python}}}"

    def steps(self, venv: str, python: str, minor: int, *, torch_index: str = "") -> Iterator[Step]:
        """Yield what is done, in this order.

        venv: the directory that is made.
        python: an interpreter, which is Python 3.`minor`.
        torch_index: URL of the index that torch comes from; "" is where all comes from.
        """
        pip = [f"{venv}/bin/python", "-m", "pip"]
        exact = ["--no-deps"] if self.device == "cpu" else []
        last = [pin for pin in self.pins if pin.startswith(("megatron-", "transformer-engine"))]
        yield Step("an environment", [python, "-m", "venv", venv])
        for pin in self.pins:
            if pin.startswith(("torch=", "torch>")):
                index = ["--index-url", torch_index] if torch_index else []
                yield Step("torch", [*pip, "install", *exact, pin, *index])
        if self.device == "cpu":
            code = "import torch; assert torch.version.cuda is None, 'it is a CUDA build'"
            hint = f"Name an index of CPU-only wheels: TORCH_INDEX_URL={CPU_TORCH}, and try again."
            yield Step("a look at torch", [f"{venv}/bin/python", "-c", code], hint)
        file = str(self.file)
        apart = [line for line in self.file.read_text().splitlines() if line in last or line not in self.pins]
        if names := [re.split("[=<>[]", line)[0] for line in apart if line and line[0] != "#"]:
            file = f"{venv}/pins.txt"
            words = " ".join(f"-e ^{name}" for name in names)
            yield _shell("their list", f"grep -v {words} {_quoted(str(self.file))} >{_quoted(file)}")
        yield Step(f"{len(self.pins) - len(last)} packages", [*pip, "install", *exact, "-r", file])
        if self.kind == "megatron":
            yield from self._megatron(venv, pip, minor)
        elif self.kind == "vllm" and self.device == "cpu":
            about = f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {self.version}+cpu\\n"
            directory = f"vllm-{self.version}.dist-info"
            command = f'mkdir -p {directory} && printf "{about}" >{directory}/METADATA'
            says = "metadata of vllm, which vLLM asks for where vllm-cpu is installed"
            yield _shell(says, f"cd {_site(venv)} && {command}")

    def _megatron(self, venv: str, pip: list[str], minor: int) -> Iterator[Step]:
        """Yield how Megatron is installed beside what it needs. Its wheels ask for Python 3.12, of whose
        compiled part lorad uses nothing: for 3.11 they are unpacked.
        """
        pins = [pin for pin in self.pins if pin.startswith("megatron-")]
        if minor >= 12:
            yield Step("Megatron", [*pip, "install", "--no-deps", *pins])
        else:
            wheels = f"{venv}/wheels"
            tags = ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "none"]
            for system in ("manylinux_2_28_", "manylinux2014_"):
                tags += ["--platform", system + os.uname().machine]
            tags += ["--platform", "any", "--only-binary=:all:"]
            yield Step("Megatron's wheels", [*pip, "download", "--no-deps", "-d", wheels, *tags, *pins])
            unpack = f"{_quoted(pip[0])} -m zipfile -e $wheel {_site(venv)} || exit"
            folder = _quoted(wheels)
            yield _shell("Megatron", f"for wheel in {folder}/*.whl; do {unpack}; done; rm -r {folder}")
        for pin in self.pins:
            if pin.startswith("transformer-engine"):
                yield Step("Transformer Engine", [*pip, "install", "--no-build-isolation", pin])


def _shell(says: str, command: str) -> Step:
    return Step(says, ["sh", "-c", command])


def _site(venv: str) -> str:
    return f"{_quoted(venv)}/lib/python3*/site-packages"


def _quoted(word: str) -> str:
    """Return a word for a shell, which reads a `~` that it begins with."""
    return word if re.fullmatch(r"~?[\w@%+=:,./-]+", word) else shlex.quote(word)


def recipe_of(kind: str, device: str = "") -> Recipe:
    """Return how a backend is installed.

    device: `cpu` or `cu`; "" is what this machine has.

    Raises SpecError where a CPU needs lorad's source tree, and there is none.
    """
    device = device or ("cu" if _NVIDIA.exists() else "cpu")
    tree = checkout() if device == "cpu" else None
    if device == "cpu" and tree is None and kind in _INSTEAD:
        what, command = _INSTEAD[kind]
        raise SpecError(
            f"{kind} needs a GPU; without one it runs only from lorad's source tree, which has what it lacks",
            hint=f"On this machine take {what}: `{command}`.",
        )
    return Recipe(kind, device, tree)


def install_lines(kind: str, *, gpu: bool | None = None) -> list[str]:
    """List the command that installs a backend, what it does, and the lines of config.yaml that name it.

    gpu: whether it is for GPUs; None looks whether this machine has one.
    """
    try:
        recipe = recipe_of(kind, "" if gpu is None else "cu" if gpu else "cpu")
    except SpecError as error:
        lines = [f"# {error.message}.", f"# {error.hint}"]
        return [*lines, *install_lines("vllm", gpu=False)] if kind == "sglang" else lines
    venv = f"{PREFIX}/{recipe.name}"
    steps = recipe.steps(venv, f"python3.{recipe.minors[0]}", recipe.minors[0])
    index = "" if recipe.device == "cu" else f", torch from {CPU_TORCH} where pip is told of no index"
    return [
        f"lorad backends install {kind}",
        f"# which does this{index}:",
        *(in_shell(step) for step in steps),
        "# and has in config.yaml:",
        "backends:",
        f"  {kind}: {recipe.entry(f'{venv}/bin/python')}",
    ]


def in_shell(step: Step) -> str:
    """Return a step as a shell reads it."""
    return " ".join(map(_quoted, step.argv))
