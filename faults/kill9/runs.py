"""The runs of a round: small, different, each with what it must become however often it is killed."""

import contextlib
import json
import random
import threading
import time
from typing import Any

from faults.kill9.box import Box
from lorad.adapters.peft import write_peft
from lorad.errors import DaemonUnreachable, LoradError, NotFound
from lorad.files import write_whole
from lorad.models.directory import linear_shapes, read_config, resolve
from lorad.records.runs import RunDetails
from lorad.rl.tasks import problem
from tests.kit.fakes.random_adapters import random_adapter
from tests.kit.world import World, world

SPEC = """
seed: {seed}
lora: {{rank: {rank}, alpha: 16, dropout: {dropout}}}
algorithm: {algorithm}
data: {{train: {task}, eval: {held_out}, prompts_per_step: 3, {data}}}
trainer: {{lr: 2.0e-3, steps: {steps}, schedule: cosine, warmup_steps: 2}}
rollout: {{max_new_tokens: 10, max_staleness: {staleness}}}
eval: {{every: 5, problems: 4}}
checkpoint: {{every: 3, keep: 2}}
pool: {{threads: {threads}}}
resources: {{restart: {restart}, max_restarts: 1000}}
reward: {reward}
env: {env}
"""
REWARD = """
def share(completion, answer):
    return sum(a == b for a, b in zip(completion, answer)) / max(len(answer), 1)
"""  # of a user: it runs in a process of its own
SHARE = "{name: reward.py:share, retries: 10}"  # also where its worker is killed at the same sample again
# two of a kind share a pool; "ahead" samples ahead of its training; "by-hand" is resumed by its user alone
KINDS: dict[str, dict[str, Any]] = {
    "calm": {
        "seed": 1,
        "algorithm": "{group_size: 4, minibatches: 2}",
        "restart": "on-failure",
        "reward": SHARE,
    },
    "ahead": {"seed": 2, "rank": 4, "staleness": 1, "task": "reverse", "restart": "on-failure"},
    "by-hand": {"seed": 3, "dropout": 0.1, "reward": SHARE},
    "apart": {"seed": 4, "threads": 2, "restart": "on-failure", "reward": SHARE},
    "critic": {
        "seed": 5,
        "algorithm": "{name: ppo, group_size: 4}",
        "restart": "on-failure",
        "reward": SHARE,
    },
    "tuned": {"seed": 6, "dropout": 0.1, "restart": "on-failure", "algorithm": "sft"},
    "preferred": {
        "seed": 7,
        "restart": "on-failure",
        "algorithm": "dpo",
        "task": "pairs.jsonl",
        "held_out": "sort",
    },
    "refill": {
        "seed": 8,
        "staleness": 1,
        "restart": "on-failure",
        "algorithm": "{name: dapo, group_size: 4}",
    },
    "adaptive": {
        "seed": 9,
        "restart": "on-failure",
        "algorithm": "{group_size: 4, kl: {coef: 0.1, target: 0.01, horizon: 50, reset_every: 2}}",
    },
    "student": {
        "seed": 10,
        "restart": "on-failure",
        "algorithm": "{name: distill, group_size: 4, kl: {reference: teacher}}",
    },
    # also where a host is killed at the same turn again and again
    "played": {
        "seed": 11,
        "restart": "on-failure",
        "task": "lookup",
        "env": "{name: lookup, turns: 3, workers: 2, retry: 10}",
    },
    "streamed": {
        "seed": 12,
        "staleness": 1,
        "restart": "on-failure",
        "task": "rows.jsonl",
        "held_out": "sort",
        "data": "streaming: true, buffer: 8",
    },
}
PAIRS = 20  # fewer than the steps of a run see
DEFAULTS: dict[str, Any] = {
    "algorithm": "{group_size: 4}",
    "rank": 8,
    "dropout": 0.0,
    "task": "sort",
    "held_out": "null",
    "staleness": 0,
    "threads": 1,
    "restart": "never",
    "reward": "exact_match",
    "env": "{}",
    "data": "shuffle: true",
}
CONFIG = "devices: {cpu_slots: 2}\n"
_LOOK_SECONDS = 0.2  # between two looks at all runs, of which each takes the daemon some milliseconds
GAVE_UP = ("got no further", "restarts")  # in the words of an end after which only its user resumes a run


def spec(kind: str, steps: int) -> str:
    return SPEC.format(**DEFAULTS | KINDS[kind] | {"steps": steps})


def _put(made: World, name: str, text: str) -> None:
    """Write a file whole: the driver of a run that was started before may be reading it."""
    write_whole(made.root / name, text.encode(), durable=False)


def start(made: World, name: str, kind: str, steps: int) -> None:
    text = spec(kind, steps)
    _put(made, "reward.py", REWARD)
    found = [problem("sort", "train", 0, number) for number in range(PAIRS)]
    pairs = [{"prompt": p.prompt, "chosen": p.answer, "rejected": p.prompt[2:-1] + "0"} for p in found]
    _put(made, "pairs.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))
    rows = [{"prompt": p.prompt, "answer": p.answer} for p in found]
    _put(made, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if not (made.root / "teacher").exists():
        (made.root / "teacher").mkdir()
        teacher = random_adapter(linear_shapes(read_config(resolve("builtin:tiny"))), 1, std=0.02)
        write_peft(teacher, made.root / "teacher", "builtin:tiny")
    made.client.run(text, source=f"{name}.yaml", cwd=str(made.root), overrides=[], name=name)


def undisturbed(kinds: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """What each kind becomes when nobody disturbs it."""
    with world() as made:
        made.home.root.mkdir(mode=0o700)
        made.home.config.write_text(CONFIG)
        made.lorad("daemon", "start")
        for kind in kinds:
            start(made, kind, kind, steps)
        for kind in kinds:
            over = made.over(kind)
            if over.reason != "completed":
                raise SystemExit(f"a run ended without being disturbed: {over.reason}: {over.detail}")
        return {kind: made.facts(kind) for kind in kinds}


class Crew:
    """Keeps runs of all kinds at work: resumes what waits for its user, replaces what is complete while
    `busy`.
    """

    def __init__(self, box: Box, kinds: list[str], steps: int, chance: random.Random) -> None:
        self.box, self.kinds, self.steps, self.chance = box, kinds, steps, chance
        self.names: dict[str, str] = {}  # name -> kind, of those that the daemon accepted
        self.present: dict[str, RunDetails] = {}  # the newest answer about each that is to work
        self.busy, self.closed = True, False
        self.resumed = self.gave_up = 0
        # runs that somebody asked to stop: they do not come back by themselves
        self.stopped: set[str] = set()
        # (run, command, attempt) of commands that were answered
        self.accepted: list[tuple[str, str, int]] = []
        self._thread = threading.Thread(target=self._work, daemon=True)

    def open(self) -> None:
        self._thread.start()

    def shut(self) -> None:
        self.closed = True
        self._thread.join()

    @property
    def working(self) -> list[str]:
        return [name for name, run in self.present.items() if run.reason != "completed"]

    def _work(self) -> None:
        while not self.closed:
            time.sleep(_LOOK_SECONDS)
            with contextlib.suppress(DaemonUnreachable):
                self._look_after()

    def _look_after(self) -> None:
        for kind in self.kinds:
            names = [name for name in self.names if self.names[name] == kind]
            current = names[-1] if names else None
            if current is not None:
                self.present[current] = self.box.client.show(current)
            if current is None or (self.busy and self.present[current].reason == "completed"):
                self._begin(kind, f"{kind}-{len(names) + 1}")
            elif self.present[current].state in ("paused", "ended"):
                self._resume(self.present[current], KINDS[kind].get("restart") == "on-failure")

    def _begin(self, kind: str, name: str) -> None:
        """The answer may be lost with a daemon that has accepted the run."""
        try:
            self.present[name] = self.box.client.show(name)
        except NotFound:
            start(self.box, name, kind, self.steps)
            self.present[name] = self.box.client.show(name)
        self.names[name] = kind

    def _resume(self, run: RunDetails, by_itself: bool) -> None:
        if run.reason == "completed":
            return
        if run.reason in ("failed", "lost", "attestation_failed"):
            self._judge_end(run, by_itself)
        try:
            attempt = self.box.client.resume(run.name).attempt
        except DaemonUnreachable:
            raise
        except LoradError as error:
            if self.box.client.show(run.name).state in ("paused", "ended"):
                self.box.wrong(f"{run.name} could not be resumed: {error}")
            return
        self.accepted.append((run.name, "resume", attempt))
        self.stopped.discard(run.name)
        self.resumed += 1

    def _judge_end(self, run: RunDetails, by_itself: bool) -> None:
        """A run that comes back by itself does, unless it said that it gives up; no kill makes a run fail."""
        told = f"{run.name} (attempt {run.attempt}, step {run.step}): {run.reason}: {run.detail}"
        if run.reason == "attestation_failed":
            self.box.wrong(told)
        if by_itself and any(words in run.detail for words in GAVE_UP):
            self.gave_up += 1
        elif by_itself and run.name not in self.stopped:
            self.box.wrong(f"did not come back by itself: {told}")
        self.box.say(told)


def completed(crew: Crew, seconds: float) -> None:
    """Until all runs are. Raises SystemExit."""
    deadline = time.monotonic() + seconds
    while crew.working or len({crew.names[name] for name in crew.present}) < len(crew.kinds):
        if time.monotonic() > deadline:
            raise SystemExit(f"not complete after {seconds:.0f} s: {list(crew.present.values())}")
        time.sleep(0.05)
