"""Write down a step: its samples into a file of their own, its facts into the journal, a line to the log."""

import hashlib
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lorad.driver import critic
from lorad.driver.attempt.metrics import trainer_metrics
from lorad.driver.rewards import Score
from lorad.driver.sampling.spread import spread_metrics
from lorad.driver.session import Rollout, Sample, Session, StepSelection, Weighed
from lorad.driver.train import Trained
from lorad.driver.weigh import importance_cap
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import StepFact
from lorad.rl.completions.widths import Widths
from lorad.rl.data import Example
from lorad.text import number


def record(
    session: Session,
    rollout: Rollout,
    scored: StepSelection,
    weighed: Weighed | None,
    trained: Trained,
    started: float,
) -> None:
    """Write down a step that is over; its number becomes the state's.

    weighed: None where nothing was trained.
    """
    HEART.work("record")
    state = session.state
    step = state.step + 1
    state.failed_rewards += int((~scored.scored).sum())
    count_skips(session, trained.skipped, has_stepped=bool(trained.steps))
    state.idle_steps += not (trained.steps or trained.critic)
    path, digest = write_samples(session, step, _samples(session, rollout, scored, weighed))
    session.seconds["total"] = time.perf_counter() - started
    leaves_out = session.spec.algorithm.refill or session.spec.data.difficulty
    fact = StepFact(
        version=rollout.plan.version,
        prompts=[group[0].example.id for group in rollout.groups],
        position=rollout.plan.position,
        samples=path,
        samples_sha256=digest,
        metrics=_metrics(session, rollout, scored, weighed, trained),
        consumed=rollout.consumed if leaves_out else None,
    )
    finish(session, fact, trained.skipped, len(trained.updates) + len(trained.critic))
    about_critic = ""
    if session.spec.algorithm.has_critic:
        ev, loss = (fact.metrics.get(key) for key in ("explained_variance", "value_loss"))
        about_critic = f"ev {number(ev, 2) or '-'}  vloss {number(loss, 4) or '-'}  "
        about_critic += "critic alone  " * critic.is_warming(session)
    shown = {
        key: number(fact.metrics.get(key), digits) or "-"
        for key, digits in (("reward", 3), ("loss", 4), ("kl", 4))
    }
    print(
        f"step {step}/{session.params.steps}  "
        f"reward {shown['reward']}  loss {shown['loss']}  kl {shown['kl']}  {about_critic}"
        f"version {state.version}  {rollout.tokens / max(rollout.seconds, 1e-9):.0f} tok/s  "
        f"{session.seconds['total']:.2f} s",
        flush=True,
    )


def count_skips(session: Session, skipped: int, *, has_stepped: bool) -> None:
    """Add the skipped updates of a step to the count of the run."""
    state = session.state
    state.skipped_updates += skipped
    state.skipped_steps = state.skipped_steps + 1 if skipped and not has_stepped else 0


def finish(session: Session, fact: StepFact, skipped: int, updates: int) -> None:
    """Journal a step, which is over then; `skipped` of its `updates` were skipped."""
    step = session.state.step + 1
    session.journal.append("step", step, fact)
    session.state.step = step
    session.metrics = fact.metrics
    if skipped:
        session.warn(
            f"{skipped} of {updates} updates of step {step} were skipped: loss or gradient was not finite"
        )


def _metrics(
    session: Session, rollout: Rollout, scored: StepSelection, weighed: Weighed | None, trained: Trained
) -> dict[str, float]:
    """Return what was measured of a step: lorad/records/metrics.py says what each figure is."""
    samples = rollout.samples
    seconds = session.seconds
    state = session.state
    first = trained.first
    steps = [*trained.steps, *(update.step for update in trained.critic)]
    values = {
        "lr": trained.lr,
        "updates": float(len(trained.steps)),
        "skipped_updates": float(trained.skipped),
        "skipped_updates_total": float(state.skipped_updates),
        "idle_steps_total": float(state.idle_steps),
        "response_length": float(np.mean([s.size for s in samples])),
        "truncated": float(np.mean([s.finish == "length" for s in samples])),
        "zero_variance_groups": float((scored.flat & (scored.sizes > 0)).sum()),
        "failed_rewards": float((~scored.scored).sum()),
        "failed_rewards_total": float(state.failed_rewards),
        "tokens": float(rollout.tokens),
        "trained_tokens": float(trained.total.tokens),
        "tokens_per_second": rollout.tokens / max(rollout.seconds, 1e-9),
        "staleness": float(rollout.plan.staleness),
        "seconds": seconds["total"],
        "seconds_sampling": rollout.seconds,
        "seconds_waited": rollout.waited + sum(step.waited for step in steps),
    }
    if any(judged.rewarder.runs_user_code for judged in session.judged) and rollout.scoring.seconds:
        values["seconds_scoring"] = rollout.scoring.seconds
    if session.spec.algorithm.refill is not None:
        values |= {"prompts_sampled": float(rollout.sampled), "prompts_used": float((~scored.flat).sum())}
    if (difficulty := session.spec.data.difficulty) is not None:
        easy = sum(mean >= difficulty.easy for mean in state.ratings.values())
        values |= {"prompts_easy": float(easy), "prompts_hard": float(len(state.ratings) - easy)}
    if session.spec.algorithm.has_critic:
        del values["zero_variance_groups"]
    if weighed is not None:
        values |= critic.metrics(weighed.training, weighed.critic, trained.critic)
    values |= _episode_metrics(samples)
    costs = defaultdict[str, float](float)
    for score in scored.scores:
        for name, count in score.costs.items():
            costs[f"cost/{name}"] += count
    values |= dict(sorted(costs.items()))
    values |= _policy_metrics(session, rollout, scored, weighed, trained) | trainer_metrics(steps)
    if first.replayed:
        values["routes_differ"] = first.rerouted / first.replayed
        values["routes_unknown"] = first.unrouted / (first.replayed + first.unrouted)
    values |= session.movement
    values |= spread_metrics(rollout, scored, session.tokenizer.special)
    return values | {f"seconds_{v}": s for v, s in seconds.items() if v != "total"}


def _policy_metrics(
    session: Session, rollout: Rollout, scored: StepSelection, weighed: Weighed | None, trained: Trained
) -> dict[str, float]:
    """Collect what was measured of rewards, loss and policy."""
    metrics: dict[str, float] = {}
    first = trained.first
    total = trained.total
    if scored.rewards.size:
        metrics |= _reward_metrics(rollout.samples, scored)
    if total.tokens:
        metrics["loss"] = total.loss / sum(update.is_finite for update in trained.updates)
        metrics |= {"clip_fraction": total.clipped / total.tokens, "ratio": total.ratio / total.tokens}
        if session.spec.algorithm.kl_coef:
            metrics["kl"] = total.kl / total.tokens
        if importance_cap(session.spec) is not None:
            metrics |= {
                "importance_capped": total.capped / total.tokens,
                "importance_max": total.importance_max,
            }
    if weighed is not None and weighed.kl is not None:
        metrics["kl"] = weighed.kl
    if session.spec.algorithm.kl.target is not None:
        metrics["kl_coef"] = session.kl_coef
    if first.tokens:
        metrics["entropy"] = first.entropy / first.tokens
    if weighed is not None and weighed.importance is not None:
        metrics |= {"rejected": float((weighed.importance == 0).mean())}
        metrics |= {"importance_max": float(weighed.importance.max())}
    if norms := [step.grad_norm for step in trained.steps]:
        metrics["grad_norm"] = sum(norms) / len(norms)
    if trained.mismatch is not None:
        metrics |= {
            "logprob_difference": trained.mismatch.mean,
            "logprob_difference_max": trained.mismatch.max,
        }
    elif rollout.plan.staleness and first.tokens:
        metrics["staleness_difference"] = first.sampler_difference / first.tokens
    return metrics


def _reward_metrics(samples: list[Sample], scored: StepSelection) -> dict[str, float]:
    """Return mean and deviation of the reward, and its mean by component and by source of rows."""
    rewards = scored.rewards.astype(np.float64)  # their squares may be too large for float32
    named = defaultdict[str, list[float]](list)
    for sample, score in zip(samples, scored.scores, strict=True):
        for name, value in score.parts.items():
            named[f"reward/{name}"].append(value)
        if sample.example.source and score.value is not None:
            named[f"reward_of/{sample.example.source}"].append(score.value)
    means = {name: float(np.mean(values)) for name, values in sorted(named.items())}
    return {"reward": float(rewards.mean()), "reward_std": float(rewards.std())} | means


def _episode_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return means over episodes, also of what the environment measured; none of completions."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    if not episodes:
        return {}
    metrics = {
        "turns": float(np.mean([len(episode.turns) for episode in episodes])),
        "observation_tokens": float(np.mean([sum(t.observed for t in e.turns) for e in episodes])),
        "seconds_env": float(np.mean([sum(t.seconds for t in e.turns) for e in episodes])),
    }
    if called := [episode for episode in episodes if episode.has_tools]:
        metrics["tool_calls"] = float(np.mean([sum(len(t.calls) for t in e.turns) for e in called]))
        metrics["tool_errors"] = float(np.mean([sum(t.tool_errors for t in e.turns) for e in called]))
    if any(sample.forks for sample in samples):
        metrics["rows"] = float(np.mean([1 + len(sample.forks) for sample in samples]))
    for name in sorted({name for episode in episodes for name in episode.metrics}):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        metrics[f"env/{name}"] = float(np.mean(values))
    return metrics


def _samples(
    session: Session, rollout: Rollout, scored: StepSelection, weighed: Weighed | None
) -> list[dict[str, Any]]:
    advantages = np.full(len(scored.scores), np.nan) if weighed is None else weighed.advantages
    lines = list[dict[str, Any]]()
    for s, score, advantage in zip(rollout.samples, scored.scores, advantages, strict=True):
        line: dict[str, Any] = {"step": session.state.step + 1, **source_of(s.example)}
        line |= line_of(s, score)
        line["advantage"] = None if np.isnan(advantage) else float(advantage)
        line |= {"tokens": s.tokens.tolist(), "logprobs": s.logprobs.tolist()}
        line["widths"] = _widths(session.widths, s)
        if s.forks:
            line |= {"rows": 1 + len(s.forks), "forks": s.forks}
        lines.append(line)
    return lines


def line_of(sample: Sample, score: Score) -> dict[str, Any]:
    """Return the part of a sample's line that steps, evaluations and trials have."""
    line: dict[str, Any] = {
        "version": sample.version,
        "prompt_id": sample.example.id,
        "index": sample.index,
        "prompt": sample.example.prompt,
        "completion": sample.text,
        "answer": sample.example.answer,
        "reward": score.value,
        "finish": sample.finish,
        "error": score.error,
    }
    if score.parts:
        line["rewards"] = score.parts
    if (episode := sample.episode) is not None:
        line |= {"task": episode.task, "turns": episode.turns, "end": episode.end}
    return line


def _widths(widths: Widths, sample: Sample) -> list[int]:
    """Return how many characters each sampled token made in its text; empty where that is not known."""
    ids = sample.tokens if sample.sampled is None else sample.tokens[sample.sampled]
    if sample.episode is None:
        return widths.of(sample.text, ids.tolist())
    counts = list[int]()
    at = 0
    for turn in sample.episode.turns:
        of_turn = widths.of(turn.text, ids[at : at + turn.tokens].tolist())
        if len(of_turn) != turn.tokens:
            return []
        counts += of_turn
        at += turn.tokens
    return counts


def source_of(example: Example) -> dict[str, str]:
    """Return the part of a sample's line that names the source of its row, where there are several."""
    return {"source": example.source} if example.source else {}


def write_samples(
    session: Session, step: int, samples: list[dict[str, Any]], directory: Path | None = None
) -> tuple[str, str]:
    """Write JSON lines, one for each sample; return the file's path within the run, and its sha256.

    directory: None for the directory of the samples of steps.
    """
    directory = directory or session.run_dir.samples
    directory.mkdir(exist_ok=True)
    path = directory / f"{step:06d}-a{session.params.attempt}.jsonl"
    data = b"\n".join(map(msgspec.json.encode, samples)) + b"\n"
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return str(path.relative_to(session.run_dir.root)), hashlib.sha256(data).hexdigest()
