"""`make bench-pool-memory`: what the preflight says that a pool takes at most, beside what real pools took.

    python -m benchmarks.training.pool_memory [--only fsdp-2 …] [--engines builtin sglang vllm]
        [--models tiny 100m] [--steps 3]

Each figure is of a run in a home of its own: the sum of PSS (shared pages divided by those who share them)
over the pool's process and all below it, at the moment when it was highest, and the highest of each kind of
process. What other processes of the machine share with them, as a library that two homes load, lowers it.
"""

import argparse
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.kit.models import make
from lorad.models.directory import resolve
from tests.kit.world import COLD, World, world
from tests.trainers.real.pairs import ENGINES, configured, missing

MB, EVERY, DEADLINE = 1 << 20, 0.05, 900.0
CASES = {
    "builtin": {},
    "fsdp-1": {"dp": 1},
    "fsdp-2": {"dp": 2},
    "megatron-1": {"dp": 1},
    "megatron-2": {"dp": 2},
}
MODELS = ("tiny", "100m")
REWARD = "def score(completion_ids):\n    return float(sum(completion_ids) % 2)\n"
SPEC = """
reward: {name: "reward.py:score"}
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 8}
rollout: {max_new_tokens: 32}
lora: {rank: 16, target_modules: all-linear}
eval: {every: 0}
checkpoint: {every: 1000000}
"""
_KINDS = {
    "guard.py": "guard",
    "lorad.trainers.ranks.worker": "rank",
    "lorad.pool": "pool",
    "sglang": "server",
    "vllm": "server",
}


@dataclass
class Peak:
    """Bytes: total, at the highest moment; of each kind then; parts: anonymous, of files, and shared then."""

    total: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)

    hwm: dict[int, int] = field(default_factory=dict)

    def look(self, pid: int) -> None:
        kinds, files = Counter[str](), dict[str, int]()
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError):
                    kind, sizes = kind_of(process), rollup(process.pid)
                    kinds[kind] += sizes["Pss_Anon"]
                    files[kind] = max(files.get(kind, 0), sizes["Rss"] - sizes["Anonymous"])
        kinds.update(files)
        if kinds.total() > self.total:
            self.total, self.kinds = kinds.total(), dict(kinds)


def rollup(pid: int) -> dict[str, int]:
    """Return the bytes of a process by the kernel's names. Pss counts shared pages in part, so that what it
    says of mapped files depends on the neighbours; Rss counts them whole.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(size) << 10 for name, size, *_ in map(str.split, lines)}


def kind_of(process: psutil.Process) -> str:
    words = " ".join([*process.cmdline(), process.name()]).lower()
    return next((kind for part, kind in _KINDS.items() if part in words), "server")


def model_of(name: str, root: Path) -> Path:
    """Return a model's directory, whose samples are as long as they may be: no token ends one."""
    tiny, directory = resolve("builtin:tiny"), root / f"{name}-endless"
    if not directory.exists():
        shutil.copytree(tiny if name == "tiny" else make(name, root), directory)
        shutil.copy(tiny / "tokenizer.json", directory)
        (directory / "generation_config.json").unlink(missing_ok=True)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
        (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


@dataclass
class Found:
    """Bytes by part as the preflight says them, and what was measured."""

    estimate: dict[str, int]
    peak: Peak

    @property
    def error(self) -> float:
        return sum(self.estimate.values()) / self.peak.total - 1


def measured(case: str, engine: str, model: Path, steps: int) -> Found:
    trainer = case.partition("-")[0]
    sizes = [f"trainer.{key}={value}" for key, value in CASES[case].items()]
    on = (f"model.path={model}", f"trainer.steps={steps}", *sizes)
    on += (f"trainer.backend={trainer}", f"rollout.backend={engine}")
    with world(COLD) as made:
        made.home.root.mkdir(parents=True)
        made.home.config.write_text(json.dumps({"backends": configured(trainer, engine)}))
        (made.root / "reward.py").write_text(REWARD)
        spec = made.spec(SPEC)
        found = Found(made.json("check", spec, *on)["memory_parts"], Peak())
        made.lorad("run", spec, *on, "--name", "cell", "--detach")
        watch(made, found.peak)
        made.completed("cell")
    return found


def watch(made: World, peak: Peak) -> None:
    """Look until the run is over."""
    pid, until = made.pid("cell", "pool"), time.monotonic() + DEADLINE
    asked = 0.0
    while time.monotonic() < until:
        peak.look(pid)
        if time.monotonic() > asked + 1:
            asked = time.monotonic()
            if made.client.show("cell").state == "ended":
                return
        time.sleep(EVERY)
    raise SystemExit(f"not over within {DEADLINE:.0f} s")


def in_words(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / MB:.0f}" for name, size in parts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if absent := missing(*args.engines, *(case.partition("-")[0] for case in args.only)):
        raise SystemExit(f"{', '.join(absent)}: `make bench-pool-memory` installs them")
    table = Table("trainer", "engine", "model", "estimate MB", "measured MB", "error", "parts", "processes")
    with tempfile.TemporaryDirectory(prefix="lr-models-") as name:
        models = {model: model_of(model, Path(name)) for model in args.models}
        for engine, case, model in itertools.product(args.engines, args.only, args.models):
            found = measured(case, engine, models[model], args.steps)
            cells = (
                *(case, engine, model),
                *(f"{size / MB:,.0f}" for size in (sum(found.estimate.values()), found.peak.total)),
                *(f"{found.error:+.0%}", in_words(found.estimate), in_words(found.peak.kinds)),
            )
            print(" | ".join(cells), flush=True)
            table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
