"""`make bench-tinker`: steps of a loop of the official client beside `lorad run` of the same work.

    python -m benchmarks.load.door [--rounds 3] [--works tiny sampled 100m] [--json FILE]

`tiny` and `100m` are supervised: a pass over rows of random tokens and a step of AdamW. `sampled` is GRPO: a
new version is published and sampled from at each step. Both sides are in one home and one pool, one after
another, in an order that turns around with each round. No checkpoint falls into the steps that count, and the
first steps do not count. A client ends without a word, so its models are parked soon: the next base has their
device.

CPU time is of all processes of the home and of the client, read from /proc when the first and the last of the
counted steps end.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table

from benchmarks.kit.models import make
from lorad.box.keys import make_key
from tests.kit.pool_kit import TINY
from tests.kit.world import World, world
from tests.tinker.real.test_client import answers, free_port

CLIENT = Path(__file__).with_name("tinker_client.py")
OWN = "lorad run"
LOOPS = {
    "awaited": "client, each result awaited",
    "ahead": "client, one step ahead",
    "sampled": "client, each result awaited",
    "sampled_together": "client, sent together",
}
CHARACTERS = "".join(map(chr, range(33, 127)))
ROLES = {
    b"lorad.pool": "pool",
    b"lorad.driver": "driver or lane",
    b"lorad.tinker.lane": "driver or lane",
    b"lorad.tinker": "door",
}  # by what stands in the command; the first that fits, but the lane's before the door's
TICKS = os.sysconf("SC_CLK_TCK")
SECONDS = 1800.0


class Work(Struct, frozen=True):
    """rows: of a step. tokens: of a row, or of a prompt. group, new: samples of a prompt, and their tokens.

    first: steps that do not count. limit: how much longer a step of the client may take.
    """

    model: str
    rows: int
    tokens: int
    first: int
    steps: int
    limit: float
    group: int = 0
    new: int = 0


WORKS = {
    "tiny": Work("tiny", 16, 64, first=5, steps=40, limit=1.3),
    "sampled": Work("tiny", 8, 16, first=3, steps=20, limit=1.3, group=4, new=16),
    "100m": Work("100m", 4, 64, first=1, steps=3, limit=1.05),
}


class Cost(Struct, frozen=True):
    """Of one step: seconds, and CPU seconds by role."""

    seconds: float
    cpu: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.cpu.values())


Rounds = list[dict[str, Cost]]


class Meter:
    """Reads what the processes of a home have used."""

    def __init__(self, home: Path, client: int = -1) -> None:
        self._home, self._client = str(home).encode(), client

    def read(self) -> Cost:
        """Return the time, and CPU seconds by role since the processes began."""
        used = defaultdict[str, float](float)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if role := self._role(process):
                    fields = (process / "stat").read_text().rpartition(")")[2].split()
                    used[role] += (int(fields[11]) + int(fields[12])) / TICKS
            except OSError:  # it ended
                continue
        return Cost(time.perf_counter(), dict(used))

    def _role(self, process: Path) -> str:
        if process.name == str(self._client):
            return "client"
        command = (process / "cmdline").read_bytes()
        if b"lorad." not in command:
            return ""
        if self._home not in command and self._home not in (process / "environ").read_bytes():
            return ""
        return next((role for name, role in ROLES.items() if name in command), "daemon")


def spent(begin: Cost, end: Cost, steps: int) -> Cost:
    cpu = {role: (used - begin.cpu.get(role, 0.0)) / steps for role, used in end.cpu.items()}
    return Cost((end.seconds - begin.seconds) / steps, cpu)


def model_of(name: str, root: Path) -> Path:
    """Return the directory of a model with the tokenizer of builtin:tiny: a token for each character."""
    if name == "tiny":
        return TINY
    directory = make(name, root)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / file).write_bytes((TINY / file).read_bytes())
    return directory


def rows_of(work: Work, steps: int) -> str:
    """Make rows as the client's: of sft a token that is not trained, and those behind it."""
    made = ("".join(random.choices(CHARACTERS, k=work.tokens)) for _ in range(work.rows * steps))
    if work.new:
        return "\n".join(json.dumps({"prompt": text}) for text in made)
    return "\n".join(json.dumps({"prompt": "7", "completion": text[2:]}) for text in made)


def spec_of(work: Work) -> dict[str, object]:
    loop: dict[str, object] = {"algorithm": "sft"}
    if work.new:
        loop = {
            "algorithm": {"name": "grpo", "group_size": work.group},
            "reward": {"name": "regex", "pattern": "^[!-O]"},
            "rollout": {"max_new_tokens": work.new, "temperature": 1.0},
        }
    fixed = {"lora": {"rank": 8}, "eval": {"every": 0}, "checkpoint": {"every": 1000}}
    return loop | fixed | {"trainer": {"lr": 1e-4, "steps": work.first + work.steps + 1}}


def own_cost(made: World, meter: Meter, name: str, model: Path, work: Work) -> Cost:
    """Measure `lorad run`."""
    data = made.root / f"{name}.jsonl"
    data.write_text(rows_of(work, work.first + work.steps + 1))
    changes = [f"model.path={model}", f"data.train={data}", f"data.prompts_per_step={work.rows}"]
    made.client.run(
        json.dumps(spec_of(work)), source="bench", cwd=str(made.root), overrides=changes, name=name
    )
    begin = when_done(made, meter, name, work.first)
    end = when_done(made, meter, name, work.first + work.steps)
    made.completed(name, SECONDS)
    return spent(begin, end, work.steps)


def when_done(made: World, meter: Meter, name: str, step: int) -> Cost:
    """Read the meter once a run has so many steps in its journal."""
    journal, deadline = made.home.run(name).journal, time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b'"kind":"step"') >= step:
            return meter.read()
        time.sleep(0.004)
    raise AssertionError(f"{name} never came to step {step}")


def client_costs(made: World, environment: dict[str, str], work: Work) -> dict[str, Cost]:
    """Measure the loops of the client."""
    asked = json.dumps(asdict(work) | {"base": f"bench/{work.model}"})
    argv = [os.environ["LORAD_TINKER_PYTHON"], str(CLIENT), asked]
    found = dict[str, Cost]()
    with (made.root / "client.log").open("w") as log:
        client = subprocess.Popen(
            argv, env=os.environ | environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        with client:
            assert client.stdout is not None
            meter, begin = Meter(made.home.root, client.pid), None
            for line in client.stdout:
                what, _, loop = line.strip().partition(" ")
                if what == "begin":
                    begin = meter.read()
                elif what == "end" and begin is not None:
                    found[loop] = spent(begin, meter.read(), work.steps)
    assert client.returncode == 0, (made.root / "client.log").read_text()[-4000:]
    return found


def measured(names: Iterable[str], rounds: int) -> dict[str, Rounds]:
    """Return the costs of each work, by loop, in each round."""
    works = {name: WORKS[name] for name in names}
    with world() as made:
        models = {name: model_of(name, made.root) for name in {work.model for work in works.values()}}
        port, key = free_port(), make_key(made.home.tinker / "keys.yaml", "bench")
        bases = json.dumps({f"bench/{name}": str(model) for name, model in models.items()})
        made.home.config.write_text(
            f"tinker: {{port: {port}, bases: {bases}, overrides: [checkpoint.every=1000], park_after: 5}}\n"
        )
        made.lorad("daemon", "start")
        made.until(lambda: answers(port), "the door answers")
        environment = {
            "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
            "TINKER_API_KEY": key,
            "TINKER_TELEMETRY": "0",
        }
        found: dict[str, Rounds] = {name: [] for name in works}
        for turn in range(rounds):
            for name, work in works.items():
                own = (made, Meter(made.home.root), f"{name}-{turn}", models[work.model], work)
                sides: list[Callable[[], dict[str, Cost]]] = [
                    lambda own=own: {OWN: own_cost(*own)},  # type: ignore[misc]
                    lambda work=work: client_costs(made, environment, work),  # type: ignore[misc]
                ]
                costs = dict[str, Cost]()
                for side in sides if turn % 2 == 0 else reversed(sides):
                    costs |= side()
                found[name].append(costs)
                print(
                    name,
                    turn,
                    {loop: round(1e3 * cost.seconds) for loop, cost in costs.items()},
                    file=sys.stderr,
                )
        return found


def spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):{unit}} ({min(values):{unit}}–{max(values):{unit}})"


def show(found: dict[str, Rounds]) -> list[str]:
    """Print the table; return what is over its limit."""
    roles = ("pool", "driver or lane", "door", "daemon", "client")
    table = Table("work", "loop", "ms", "of lorad run", "CPU ms", "of lorad run", "without client", *roles)
    wrong = []
    for name, rounds in found.items():
        for loop in sorted(rounds[0], key=[OWN, *LOOPS].index):
            costs, own = [turn[loop] for turn in rounds], [turn[OWN] for turn in rounds]
            walls = [cost.seconds / other.seconds for cost, other in zip(costs, own, strict=True)]
            cpus = [cost.total / other.total for cost, other in zip(costs, own, strict=True)]
            here = [
                (cost.total - cost.cpu.get("client", 0.0)) / other.total
                for cost, other in zip(costs, own, strict=True)
            ]
            table.add_row(
                name,
                LOOPS.get(loop, loop),
                spread([1e3 * cost.seconds for cost in costs], ".1f"),
                spread(walls, ".2f"),
                spread([1e3 * cost.total for cost in costs], ".1f"),
                spread(cpus, ".2f"),
                spread(here, ".2f"),
                *(
                    f"{statistics.median(1e3 * cost.cpu.get(role, 0.0) for cost in costs):.1f}"
                    for role in roles
                ),
            )
            if (ratio := statistics.median(walls)) > WORKS[name].limit:
                wrong.append(f"{name}, {LOOPS[loop]}: {ratio:.2f}x, at most {WORKS[name].limit}x")
    Console(width=200).print(table)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--works", nargs="+", choices=[*WORKS], default=[*WORKS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measured(options.works, options.rounds)
    if options.json:
        plain = {
            name: [{loop: asdict(cost) for loop, cost in turn.items()} for turn in rounds]
            for name, rounds in found.items()
        }
        options.json.write_text(json.dumps(plain))
    if wrong := show(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
