"""`make bench-tinker`: steps of a loop of the official client beside `lorad run` of the same work.

    python -m tests.benchmarks.load.door [--steps 60] [--rounds 2] [--models tiny 100m] [--json FILE]

The work is supervised: a pass over rows of random tokens and a step of AdamW. Both sides are in one home and
one pool, one after another; a step is wall time from its end to the end of the next one, checkpoints of every
20th step included. Of the rounds the least is taken, so that a busy neighbour counts less.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lorad.box.keys import make_key
from lorad.protocol.journal import lineage, read
from tests.benchmarks.kit.models import make
from tests.kit.pool_kit import TINY
from tests.kit.world import World, world
from tests.tinker.real.test_client import answers, free_port

FIRST = 5  # steps that are not counted
LIMITS = {"tiny": 1.3, "100m": 1.05}
CLIENT = Path(__file__).with_name("tinker_client.py")
WAYS = {"one_by_one": "each result awaited", "together": "step sent with its pass", "ahead": "one step ahead"}
CHARACTERS = "".join(map(chr, range(33, 127)))
SPEC = """
algorithm: sft
lora: {rank: 8}
trainer: {lr: 1.0e-4}
eval: {every: 0}
checkpoint: {every: 20}
"""

Found = dict[str, float]


class Work(NamedTuple):
    """Rows of a step, and tokens of a row."""

    rows: int
    tokens: int


WORKS = {"tiny": Work(16, 64), "100m": Work(8, 128)}


def model_of(name: str, root: Path) -> Path:
    """The directory of a model with the tokenizer of builtin:tiny: a token for each character."""
    if name == "tiny":
        return TINY
    directory = make(name, root)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / file).write_bytes((TINY / file).read_bytes())
    return directory


def rows_of(work: Work, steps: int) -> str:
    """Rows of a prompt of one token and a completion, behind which is the token that ends it."""
    made = ("".join(random.choices(CHARACTERS, k=work.tokens - 2)) for _ in range(work.rows * steps))
    return "\n".join(json.dumps({"prompt": "7", "completion": text}) for text in made)


def run_seconds(made: World, name: str, model: Path, work: Work, steps: int) -> float:
    """Seconds of a step of `lorad run`."""
    data = made.root / f"{name}.jsonl"
    data.write_text(rows_of(work, steps))
    changes = [f"model.path={model}", f"data.train={data}", f"data.prompts_per_step={work.rows}"]
    made.client.run(
        SPEC, source="bench", cwd=str(made.root), overrides=[*changes, f"trainer.steps={steps}"], name=name
    )
    made.completed(name, 1800)
    records = lineage([record for record, _ in read(made.home.run(name).journal)])
    ends = [record.at for record in records if record.kind == "step"]
    assert len(ends) == steps
    return (ends[-1] - ends[FIRST - 1]) / (steps - FIRST)


def client_seconds(environment: dict[str, str], base: str, work: Work, steps: int) -> Found:
    """Seconds of a step of the client's loop, by how it waits."""
    argv = [os.environ["LORAD_TINKER_PYTHON"], str(CLIENT), base, *map(str, (work.rows, work.tokens, steps))]
    done = subprocess.run(argv, env=os.environ | environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(options: argparse.Namespace) -> dict[str, list[Found]]:
    """The rounds of each model."""
    with world() as made:
        models = {name: model_of(name, made.root) for name in options.models}
        port, key = free_port(), make_key(made.home.tinker / "keys.yaml", "bench")
        bases = json.dumps({f"bench/{name}": str(model) for name, model in models.items()})
        made.home.config.write_text(f"tinker: {{port: {port}, bases: {bases}}}\n")
        made.lorad("daemon", "start")
        made.until(lambda: answers(port), "the door answers")
        environment = {
            "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
            "TINKER_API_KEY": key,
            "TINKER_TELEMETRY": "0",
        }
        found: dict[str, list[Found]] = {name: [] for name in models}
        for name, model in models.items():
            for turn in range(options.rounds):
                own = {"lorad run": run_seconds(made, f"{name}-{turn}", model, WORKS[name], options.steps)}
                client = client_seconds(environment, f"bench/{name}", WORKS[name], options.steps)
                found[name].append(own | client)
                print(name, found[name][-1], file=sys.stderr, flush=True)
        return found


def show(found: dict[str, list[Found]]) -> list[str]:
    """Print the table; what is over its limit."""
    table, wrong = Table("model", "work of a step", "loop", "ms", "of lorad run", "limit"), []
    for name, turns in found.items():
        least = {way: min(turn[way] for turn in turns) for way in turns[0]}
        own, work = least["lorad run"], WORKS[name]
        table.add_row(name, f"{work.rows} x {work.tokens} tokens", "lorad run", f"{1e3 * own:.1f}", "", "")
        for way, words in WAYS.items():
            ratio = least[way] / own
            table.add_row("", "", words, f"{1e3 * least[way]:.1f}", f"{ratio:.2f}x", f"{LIMITS[name]}x")
            if way == "ahead" and ratio > LIMITS[name]:
                wrong.append(f"{name}: {ratio:.2f}x, at most {LIMITS[name]}x")
    Console().print(table)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=[*WORKS], default=[*WORKS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = measured(options)
    if options.json:
        options.json.write_text(json.dumps(found))
    if wrong := show(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
