"""Write down a step: its samples into a file of their own, its facts into the journal, a line into the log."""

from __future__ import annotations

import hashlib
import os
import time

import msgspec
import numpy as np

from lorad.driver.session import Rollout, Session, Weighed
from lorad.driver.train import Trained
from lorad.protocol.calls import Stepped
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import StepFact


def record(session: Session, rollout: Rollout, weighed: Weighed, trained: Trained, started: float) -> None:
    """The step is done: its number becomes the state's."""
    HEART.work("record")
    state = session.state
    step = state.step + 1
    path, digest = write_samples(session, step, rollout, weighed)
    session.seconds["total"] = time.perf_counter() - started
    fact = StepFact(
        version=rollout.plan.version,
        prompts=[e.id for e in rollout.plan.examples],
        position=rollout.plan.position,
        samples=path,
        samples_sha256=digest,
        metrics=metrics(session, rollout, weighed, trained),
    )
    session.journal.append("step", step, fact)
    state.step = step
    m = fact.metrics
    print(
        f"step {step}/{session.params.steps}  reward {m['reward']:.3f}  loss {m['loss']:.4f}  kl {m['kl']:.4f}  "
        f"version {state.version}  {m['tokens_per_second']:.0f} tok/s  {m['seconds']:.2f} s",
        flush=True,
    )


def metrics(session: Session, rollout: Rollout, weighed: Weighed, trained: Trained) -> dict[str, float]:
    """Means over samples or tokens; seconds are wall time. `logprob_difference`: mean |trainer - engine|, nats.

    seconds_sample: that the loop waited for its samples; seconds_sampling: that they took, perhaps meanwhile.
    seconds_attest: a part of seconds_publish. seconds_waited: of the run's calls, for a turn in the pool.
    staleness: see `Plan`.
    """
    samples, seconds = rollout.samples, session.seconds
    first, n = trained.first, max(trained.first.tokens, 1)
    total = max(trained.total.tokens, 1)
    values = {
        "reward": float(weighed.rewards.mean()),
        "reward_std": float(weighed.rewards.std()),
        "loss": trained.total.loss / max(trained.updates, 1),
        "kl": trained.total.kl / total,
        "entropy": first.entropy / n,
        "grad_norm": trained.grad_norm,
        "lr": trained.lr,
        "clip_fraction": trained.total.clipped / total,
        "ratio": trained.total.ratio / total,
        "logprob_difference": first.sampler_difference / n,
        "logprob_difference_max": first.sampler_difference_max,
        "response_length": float(np.mean([s.tokens.size for s in samples])),
        "truncated": float(np.mean([s.finish == "length" for s in samples])),
        "zero_variance_groups": float(weighed.flat.sum()),
        "failed_rewards": float(sum(s.value is None for s in weighed.scores)),
        "tokens": float(rollout.tokens),
        "tokens_per_second": rollout.tokens / max(rollout.seconds, 1e-9),
        "staleness": float(rollout.plan.staleness),
        "seconds": seconds["total"],
        "seconds_sampling": rollout.seconds,
        "seconds_waited": rollout.waited + sum(step.waited for step in trained.steps),
    }
    return values | trainer_metrics(trained.steps) | {f"seconds_{v}": s for v, s in seconds.items() if v != "total"}


def trainer_metrics(steps: list[Stepped]) -> dict[str, float]:
    """What is known of it. Memory in bytes, on all of the trainer's devices; rates over the time that it computed."""
    found: dict[str, float] = {}
    seconds = sum(step.seconds for step in steps)
    if seconds:
        found["trainer_tokens_per_second"] = sum(step.tokens for step in steps) / seconds
    if (memory := steps[-1].memory) is not None:
        found["trainer_memory"] = float(memory)
    if peaks := [step.memory_peak for step in steps if step.memory_peak is not None]:
        found["trainer_memory_peak"] = float(max(peaks))
    if measured := [(step.mfu, step.seconds) for step in steps if step.mfu is not None]:
        found["mfu"] = sum(mfu * time for mfu, time in measured) / sum(time for _, time in measured)
    return found


def write_samples(session: Session, step: int, rollout: Rollout, weighed: Weighed) -> tuple[str, str]:
    """JSON lines, one for each sample; (path relative to the run, sha256)."""
    directory = session.run_dir.samples
    directory.mkdir(exist_ok=True)
    path = directory / f"{step:06d}-a{session.params.attempt}.jsonl"
    rows = zip(rollout.samples, weighed.scores, weighed.rewards, weighed.advantages, strict=True)
    lines = [
        msgspec.json.encode(
            {
                "step": step,
                "version": s.version,
                "prompt_id": s.example.id,
                "index": s.index,
                "prompt": s.example.prompt,
                "completion": s.text,
                "answer": s.example.answer,
                "reward": float(reward),
                "advantage": float(advantage),
                "finish": s.finish,
                "error": score.error,
                "tokens": s.tokens.tolist(),
                "logprobs": s.logprobs.tolist(),
            }
        )
        for s, score, reward, advantage in rows
    ]
    data = b"\n".join(lines) + b"\n"
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return str(path.relative_to(session.run_dir.root)), hashlib.sha256(data).hexdigest()
