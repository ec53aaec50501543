"""The runs of the frozen world: who they are, and the journals, samples and logs that their drivers would
have left.
"""

import hashlib
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lorad.box.paths import RunDir
from lorad.protocol.evals import SetScore
from lorad.protocol.journal import (
    AttemptFact,
    CheckpointFact,
    EndFact,
    EvalFact,
    Record,
    StepFact,
    VersionFact,
    encode,
)
from tests.kit.frozen.episodes import completions_of, episodes_of
from tests.kit.frozen.texts import hostile_log, samples_of

NOW = float(os.environ.get("FROZEN_AT", 1_767_261_600))  # when the world stands still: 2026-01-01 10:00 UTC
Metrics = dict[str, float]
QWEN, TINY = "Qwen/Qwen3-8B", "builtin:tiny"


@dataclass(frozen=True)
class Story:
    """A run of the frozen world.

    ago: seconds since the last step, or since it was made.
    pace: seconds of a step.
    stride: steps between two that are kept.
    odd: what is not as usual at a step.
    is_agent: its samples are episodes, and its evaluations keep their completions.
    resumed: the checkpoint's step that attempt 2 began from.
    """

    name: str
    state: str = "running"
    owner: str = "ann"
    base: str = QWEN
    pool: str | None = "qwen3-8b-1"
    step: int = 60
    steps: int = 200
    rewards: tuple[float, float] = (0.2, 0.8)  # at the beginning, and where it goes to
    ago: float = 4.0
    pace: float = 21.0
    stride: int = 1
    reason: str | None = None
    detail: str = ""
    waiting: str = ""
    origin: str | None = None
    resumed: int = 0
    tokens_per_second: float = 4100.0
    odd: Callable[[int], Metrics] = field(default=lambda step: {})
    spec: dict[str, Any] = field(default_factory=dict)
    is_agent: bool = False

    @property
    def kept(self) -> range:
        """The steps that are in the journal."""
        return range(self.stride, self.step + 1, self.stride)

    @property
    def is_tiny(self) -> bool:
        return self.base == TINY

    def at(self, step: int) -> float:
        """When a step was over."""
        return NOW - self.ago - (self.step - step) * self.pace


def runaway(step: int) -> Metrics:
    return {"kl": 0.004 * math.exp(step / 22), "grad_norm": 0.4 * math.exp(step / 60), "lr": 1e-4}


def not_finite(step: int) -> Metrics:
    return (
        {"reward": math.nan, "loss": math.nan, "reward_std": math.nan, "failed_rewards": 5.0}
        if step > 26
        else {}
    )


LONG = ("long-user-name-" * 4)[:59] + "z"  # 60 characters
STORIES = (
    Story("support-bot", step=312, steps=500, rewards=(0.21, 0.86), spec={"trainer": {"lr": 2e-5}}),
    Story(
        "sorter",
        base=TINY,
        pool="tiny-1",
        step=42,
        steps=60,
        pace=1.2,
        ago=1,
        rewards=(0.05, 0.93),
        resumed=20,
        tokens_per_second=5200,
    ),
    Story("bold-lr", step=118, steps=400, rewards=(0.3, 0.1), odd=runaway, ago=9),
    Story(
        "one-answer",
        step=88,
        ago=11,
        rewards=(0.7, 1.0),
        odd=lambda step: {"zero_variance_groups": 15.0},
        spec={"eval": {"sets": {"hard": {"data": "/srv/data/hard.jsonl"}}}},
        is_agent=True,
    ),
    Story(
        "essays",
        owner="bob",
        step=64,
        ago=14,
        odd=lambda step: {"truncated": 0.72, "response_length": 1911.0},
    ),
    Story("judge-fails", step=31, ago=17, odd=not_finite),
    Story("hanging", base=TINY, pool="tiny-1", step=9, steps=60, pace=1.1, ago=1260, tokens_per_second=4700),
    Story("support-bot-fork", state="starting", step=0, origin="support-bot@200", ago=35),
    Story(
        "waits",
        state="queued",
        pool=None,
        step=0,
        ago=540,
        waiting="no device: cuda:0 held by pool qwen3-8b-1 (ann, uid 1001, runs support-bot, bold-lr and "
        "4 others); cuda:1 is in use by python (pid 40122, carol, 38.2 GiB)",
    ),
    Story(
        "waits-too", state="queued", owner=LONG, pool=None, step=0, ago=600, waiting="2 runs are before it"
    ),
    Story(
        "summaries",
        state="paused",
        owner="bob",
        pool=None,
        step=120,
        steps=400,
        ago=5400,
        rewards=(0.4, 0.61),
    ),
    Story(
        "übersetzer-翻訳者-🦉🦉",
        state="ended",
        reason="completed",
        base=TINY,
        pool=None,
        step=30,
        steps=30,
        ago=7300,
        pace=1.0,
    ),
    Story(
        "gsm8k-32k",
        state="ended",
        reason="failed",
        pool=None,
        step=3,
        steps=100,
        ago=9100,
        detail="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB; "
        "trainer.tokens_per_microbatch 8192 would fit",
    ),
    Story(
        "night-shift",
        state="ended",
        reason="lost",
        owner="bob",
        pool=None,
        step=77,
        ago=36000,
        detail="its pool qwen3-8b-2 was killed by SIGKILL (out of memory: 251 GiB of 256 GiB in use)",
    ),
    Story(
        "tampered",
        state="ended",
        reason="attestation_failed",
        pool=None,
        step=12,
        steps=100,
        ago=41000,
        detail="tampered@13: the engine serves other weights: log-probabilities differ by 0.31 nats, "
        "noise is 0.004",
    ),
    Story(
        "sorter-hot",
        state="ended",
        reason="stopped",
        base=TINY,
        pool=None,
        step=12,
        steps=40,
        ago=3,
        pace=0.9,
        origin="sorter@20",
        spec={"rollout": {"temperature": 1.3}},
    ),
    Story(
        "million",
        base=TINY,
        pool="tiny-1",
        step=1_003_520,
        steps=2_000_000,
        stride=4096,
        pace=0.8,
        ago=2,
        rewards=(0.5, 0.97),
    ),
    Story(
        "support-v3",
        state="ended",
        reason="completed",
        pool=None,
        step=100,
        steps=100,
        ago=78000,
        rewards=(0.3, 0.78),
    ),
)


def digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def spec_of(story: Story) -> dict[str, Any]:
    """What its owner would have written."""
    rollout = {
        "backend": "builtin" if story.is_tiny else "sglang",
        "max_new_tokens": 12 if story.is_tiny else 2048,
    }
    data = {"train": "sort" if story.is_tiny else "/srv/data/gsm8k.jsonl", "prompts_per_step": 16}
    rollout |= story.spec.get("rollout", {})
    own = {"model": {"path": story.base}, "data": data, "rollout": rollout, "seed": 7}
    reward = {"reward": "exact_match" if story.is_tiny else "gsm8k"}
    own |= {"eval": story.spec["eval"]} if "eval" in story.spec else {}
    return own | reward | {"trainer": {"lr": 1e-3, "steps": story.steps, **story.spec.get("trainer", {})}}


def measured(story: Story, step: int, chance: random.Random) -> Metrics:
    """The metrics of a step as a driver writes them."""
    low, high = story.rewards
    part = 1 - math.exp(-4 * step / story.steps)
    length = 9.0 if story.is_tiny else 420 - 90 * part + chance.gauss(0, 12)
    seconds = story.pace * chance.uniform(0.9, 1.1)
    shares = {"sample": 0.46, "score": 0.06, "weigh": 0.005, "train": 0.38, "publish": 0.06, "attest": 0.035}
    usual = {
        "reward": min(max(low + (high - low) * part + chance.gauss(0, 0.025), 0.0), 1.0),
        "reward_std": 0.4 - 0.2 * part,
        "loss": 0.02 * math.exp(-3 * part) + chance.gauss(0, 0.002),
        "kl": 0.05 * part + abs(chance.gauss(0, 0.002)),
        "entropy": 1.3 - 0.7 * part + chance.gauss(0, 0.02),
        "grad_norm": 0.8 - 0.3 * part + abs(chance.gauss(0, 0.05)),
        "lr": float(story.spec.get("trainer", {}).get("lr", 1e-3)),
        "clip_fraction": 0.04 * part,
        "logprob_difference": 0.0 if story.is_tiny else 0.006 + abs(chance.gauss(0, 0.001)),
        "response_length": length,
        "truncated": max(0.1 - 0.1 * part, 0.0),
        "zero_variance_groups": float(round(4 * part)),
        "failed_rewards": 0.0,
        "tokens": 128 * length,
        "tokens_per_second": story.tokens_per_second + chance.gauss(0, 60),
        "trainer_tokens_per_second": 2.1 * story.tokens_per_second,
        "seconds": seconds,
    }
    return usual | {f"seconds_{verb}": share * seconds for verb, share in shares.items()} | story.odd(step)


class Writer:
    """The lines of a journal, at times of its own."""

    def __init__(self, story: Story) -> None:
        self.story, self.lines, self.attempt, self.version = story, list[bytes](), 0, -1
        self.parent: int | None = None

    def put(self, kind: str, step: int, at: float, data: msgspec.Struct | dict[str, Any]) -> None:
        plain = data if isinstance(data, dict) else msgspec.to_builtins(data)
        record = Record(1, len(self.lines) + 1, self.story.name, self.attempt, step, kind, at, plain)
        self.lines.append(encode(record))

    def begin(self, at: float, resumed_from: int | None) -> None:
        self.attempt += 1
        tiny = self.story.is_tiny
        about = AttemptFact(
            4000 + self.attempt,
            self.story.steps,
            self.story.pool or "qwen3-8b-2",
            digest(self.story.base),
            resumed_from,
            43_646_976 if not tiny else 92_160,
            model_sha256=digest("model"),
            base_parameters=8_190_735_360 if not tiny else 1_321_984,
        )
        self.put("attempt", resumed_from or 0, at, about)
        if resumed_from is not None:
            self.put("rewind", resumed_from, at, {"to": resumed_from})
            self.parent = resumed_from  # the numbers of the first attempt are those of its steps
            self.publish(resumed_from, at + 1)

    def publish(self, step: int, at: float) -> None:
        self.version += 1
        path, before = f"versions/{self.version:06d}", self.parent
        self.parent = self.version
        name, attested = (
            f"{self.story.name}@{self.version}",
            "inconclusive" if self.version % 97 == 5 else "passed",
        )
        words = (
            "delivery passed, name passed, amplified passed"
            if attested == "passed"
            else "amplified: too noisy"
        )
        fact = VersionFact(self.version, digest(name), before, path, 16, 32.0, 87_293_952, attested, words)
        self.put("version", step, at, fact)


def journal(story: Story, root: Path) -> list[bytes]:
    """All lines of a run's journal."""
    writer, chance = Writer(story), random.Random(story.name)
    writer.begin(story.at(0) - 20, None)
    writer.publish(0, story.at(0) - 12)
    writer.put("eval", 0, story.at(0) - 5, EvalFact(0, story.rewards[0], 256, 0))
    for step in order(story):
        if story.resumed and step == story.resumed + 1 and writer.version > step:
            writer.begin(story.at(step) - 4, story.resumed)
        a_step(writer, step, measured(story, step, chance), root)
    if story.state == "ended" or story.state == "paused":
        reason = story.reason or "stopped"
        writer.put("end", story.step, NOW - story.ago + 2, EndFact(reason, story.detail))
    return writer.lines


def order(story: Story) -> Iterator[int]:
    """The steps as they were made: some twice where an attempt was resumed."""
    for step in story.kept:
        yield step
        if story.resumed and step == story.resumed + 4:
            yield from range(story.resumed + 1, step + 1)


def a_step(writer: Writer, step: int, metrics: Metrics, root: Path) -> None:
    story, at, every = writer.story, writer.story.at(step), 10 * writer.story.stride
    samples = f"samples/{step:06d}-a{writer.attempt}.jsonl"
    sha256 = digest(samples)
    if step > story.step - 3 * story.stride:  # of the last three the files are kept
        texts = episodes_of(step, writer.version) if story.is_agent else b""
        data = texts or samples_of(story.base, step, writer.version)
        (root / "samples").mkdir(exist_ok=True)
        (root / samples).write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
    step_fact = StepFact(
        writer.version, [f"p{n}" for n in range(16)], 16 * step - 16, samples, sha256, metrics
    )
    writer.put("step", step, at, step_fact)
    writer.publish(step, at + 0.2)
    if step % every == 0:
        score = (metrics["reward"] if math.isfinite(metrics["reward"]) else 0.0) * 0.97
        fact = EvalFact(writer.version, score, 256, 0)
        writer.put("eval", step, at + 0.4, with_completions(fact, step, root) if story.is_agent else fact)
        path = f"checkpoints/{step:06d}-a{writer.attempt}"
        writer.put("checkpoint", step, at + 0.5, CheckpointFact(path, writer.version, 261_881_856))
        (root / path).mkdir(parents=True, exist_ok=True)
    if step % every == 0 or step > story.step - 3 * story.stride:
        (root / f"versions/{writer.version:06d}").mkdir(parents=True, exist_ok=True)


def with_completions(fact: EvalFact, step: int, root: Path) -> EvalFact:
    """An evaluation of two sets that kept what was said."""
    path, data = f"evals/{step:06d}-a1.jsonl", completions_of(step, fact.version)
    (root / "evals").mkdir(exist_ok=True)
    (root / path).write_bytes(data)
    sha256, sets = hashlib.sha256(data).hexdigest(), {"hard": SetScore(float(step >= 80), 2, 0)}
    return msgspec.structs.replace(fact, sets=sets, samples=path, samples_sha256=sha256)


def write_files(story: Story, directory: RunDir) -> None:
    """Journal, samples and logs."""
    (directory.root / "journal.jsonl").write_bytes(b"".join(journal(story, directory.root)))
    log = directory.attempt(2 if story.resumed else 1).log
    log.parent.mkdir(parents=True, exist_ok=True)
    chance = random.Random(story.name)
    lines = [said(story, step, measured(story, step, chance)) for step in list(story.kept)[-200:]]
    log.write_bytes("\n".join(lines).encode() + b"\n" + hostile_log())


def said(story: Story, step: int, metrics: Metrics) -> str:
    """What a driver prints of a step."""
    return (
        f"step {step}/{story.steps}  reward {metrics['reward']:.3f}  loss {metrics['loss']:.4f}  "
        f"kl {metrics['kl']:.4f}  version {step}  {metrics['tokens_per_second']:.0f} tok/s  "
        f"{metrics['seconds']:.2f} s"
    )
