"""A step on completions that the data hold, of sft or dpo. Nothing is sampled but evaluations.

Only what is evaluated, or in a checkpoint, is published.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from lorad.driver import checkpoint
from lorad.driver.attempt.metrics import trainer_metrics
from lorad.driver.evals.evaluate import evaluate, evaluation_due
from lorad.driver.publish import publish_changes
from lorad.driver.record import count_skips, finish, source_of, write_samples
from lorad.driver.session import Plan, Session
from lorad.driver.update import Update, current_rate, update
from lorad.driver.weigh import predictions
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward, LogprobsResult
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import StepFact
from lorad.rl.completions.formats import label_of
from lorad.rl.data import Example
from lorad.rl.sources import Row
from lorad.text import number

_OF_AN_EVAL = ("nll", "token_accuracy", "pair_accuracy")
LINEAR = PolicyLoss("linear")
Metrics = dict[str, float]
_SHORT = {  # names of metrics in the line of a step
    "loss": "loss",
    "perplexity": "ppl",
    "token_accuracy": "right",
    "pair_accuracy": "pairs",
    "chosen_reward": "chosen reward",
    "rejected_reward": "rejected reward",
    "reward_margin": "margin",
    "held_out_loss": "held-out loss",
    "held_out_token_accuracy": "held-out right",
    "held_out_pair_accuracy": "held-out pairs",
}


class _Likely(NamedTuple):
    """How likely completions are, over their trained tokens.

    nll: mean negative log-likelihood, nats per token.
    token_accuracy: share of tokens than which no other was more likely; None where the pool does not say.
    """

    nll: float
    token_accuracy: float | None


class Objective(Protocol):
    """What a step minimises."""

    def learn(self, session: Session, examples: Sequence[Example], rate: float) -> tuple[Update, Metrics]:
        """Do one update; returns it, and what was measured."""

    def held_out(self, session: Session) -> Metrics:
        """Measure the held-out examples that have completions; empty without any."""


class Likelihood:
    """The objective of sft: mean negative log-likelihood of the trained tokens of a step."""

    def learn(self, session: Session, examples: Sequence[Example], rate: float) -> tuple[Update, Metrics]:
        trained = trained_of(examples).astype(np.bool_)
        batch = replace(batch_of(examples), sampled=None if trained.all() else trained)
        size = batch.targets.size
        work = ForwardBackward(batch, PolicyTargets(np.ones(size, np.float32)), LINEAR, float(size))
        done = update(session, work, rate)
        if done.stats is None:
            return done, {}
        right = None if done.stats.correct is None else done.stats.correct / size
        return done, _likelihood("", _Likely(done.stats.loss, right))

    def held_out(self, session: Session) -> Metrics:
        likely = held_out_likelihood(session)
        return {} if likely is None else _likelihood("held_out_", likely) | {"held_out_nll": likely.nll}


def step(session: Session, objective: Objective) -> None:
    """Train on the next rows, and record and evaluate that."""
    started = time.perf_counter()
    session.seconds = {}
    session.movement = {}
    state = session.state
    rate = current_rate(session)
    examples = session.train_data.take(state.position, session.spec.data.prompts_per_step)
    now = Plan(state.step, examples, state.position, state.version, state.step)
    with session.timed("train"):
        done, measured = objective.learn(session, examples, rate)
    state.position += len(examples)
    if done.step is not None:
        state.changed = state.step + 1
    is_evaluated = evaluation_due(session, state.step + 1)
    if is_evaluated or checkpoint.is_due(session, state.step + 1):
        publish_changes(session, state.step + 1)
    if is_evaluated:
        HEART.work("evaluate")
        with HEART.tells("evaluating"):
            measured |= objective.held_out(session)
    HEART.work("record")
    count_skips(session, int(not done.is_finite), has_stepped=done.step is not None)
    session.state.idle_steps += done.step is None
    path, digest = write_samples(session, now.step + 1, _samples(session, now))
    session.seconds["total"] = time.perf_counter() - started
    fact = StepFact(
        version=now.version,
        prompts=[e.id for e in now.examples],
        position=now.position,
        samples=path,
        samples_sha256=digest,
        metrics=_metrics(session, now.examples, done, rate) | measured,
    )
    finish(session, fact, int(not done.is_finite), 1)
    shown = [f"{name} {number(measured[key], 4)}" for key, name in _SHORT.items() if key in measured]
    print(
        f"step {session.state.step}/{session.params.steps}  {'  '.join(shown)}  lr {rate:.3g}  "
        f"version {session.state.version}  {fact.metrics['tokens_per_second']:.0f} tok/s  "
        f"{session.seconds['total']:.2f} s",
        flush=True,
    )
    if is_evaluated:
        evaluate(session, *(measured.get(f"held_out_{name}") for name in _OF_AN_EVAL))


def held_out_likelihood(session: Session) -> _Likely | None:
    """Return how likely the held-out completions are, see `likelihood_of`; None without any."""
    examples = [example for example in session.held_out if example.targets]
    if not examples:
        return None
    return likelihood_of(session, examples, predictions(session, "slot", batch_of(examples)))


def likelihood_of(session: Session, examples: Sequence[Example], predicted: LogprobsResult) -> _Likely | None:
    """Return how likely the completions are, of preferences the ones that should be; None without any.

    predicted: what the pool says of all tokens of `batch_of`.
    """
    is_target = [is_wanted(session, e, index) for e in examples for index in range(len(e.targets))]
    lengths = [target.tokens.size for e in examples for target in e.targets]
    counted = (trained_of(examples) * np.repeat(is_target, lengths)).astype(np.bool_)
    if not counted.any():
        return None
    correct = None if predicted.correct is None else float(predicted.correct[counted].mean())
    return _Likely(float(-predicted.logprobs[counted].mean(dtype=np.float64)), correct)


def is_wanted(session: Session, example: Example, index: int) -> bool:
    """Return whether a completion should be likely: it is neither rejected nor labelled as bad."""
    algorithm = session.spec.algorithm
    if algorithm.kind == "preference" and algorithm.preference.loss == "kto":
        return label_of(Row(0, example.id, example.row), session.spec.data)
    return index == 0


def batch_of(examples: Sequence[Example]) -> Batch:
    """Return the completions of the examples, each example a group."""
    return Batch.of([(np.array(e.tokens, np.int32), [t.tokens for t in e.targets]) for e in examples])


def trained_of(examples: Sequence[Example]) -> np.ndarray:
    """Return float32 [T]: 1 for the tokens of `batch_of` that are trained, 0 for the others."""
    return np.concatenate([t.trained for e in examples for t in e.targets]).astype(np.float32)


def _metrics(session: Session, examples: Sequence[Example], done: Update, rate: float) -> Metrics:
    """Collect what every objective measures; seconds are wall time, and `tokens` count prompts, too."""
    seconds = session.seconds
    state = session.state
    tokens = sum(len(e.tokens) + sum(t.tokens.size for t in e.targets) for e in examples)
    values = {
        "lr": rate,
        "updates": float(done.step is not None),
        "skipped_updates": float(not done.is_finite),
        "skipped_updates_total": float(state.skipped_updates),
        "idle_steps_total": float(state.idle_steps),
        "tokens": float(tokens),
        "trained_tokens": float(sum(t.trained.sum() for e in examples for t in e.targets)),
        "tokens_per_second": tokens / max(seconds["train"], 1e-9),
        "seconds": seconds["total"],
    }
    if done.stats is not None:
        values["entropy"] = done.stats.entropy / done.stats.tokens
    if done.step is not None:
        values |= {"grad_norm": done.step.grad_norm, "seconds_waited": done.step.waited}
        values |= trainer_metrics([done.step])
    return values | session.movement | {f"seconds_{v}": s for v, s in seconds.items() if v != "total"}


def _likelihood(prefix: str, likely: _Likely) -> Metrics:
    values = {"loss": likely.nll, "perplexity": math.exp(min(likely.nll, 99.0))}
    if likely.token_accuracy is not None:
        values["token_accuracy"] = likely.token_accuracy
    return {f"{prefix}{name}": value for name, value in values.items()}


def _samples(session: Session, now: Plan) -> list[dict[str, object]]:
    return [
        {
            "step": now.step + 1,
            "version": session.name_of(now.version),
            "prompt_id": e.id,
            **source_of(e),
            "index": index,
            "prompt": e.prompt,
            "completion": session.tokenizer.completion(target.tokens.tolist(), ()),
            "answer": e.answer,
            "finish": ("chosen", "rejected")[index] if len(e.targets) > 1 else "stop",
            "tokens": target.tokens.tolist(),
        }
        for e in now.examples
        for index, target in enumerate(e.targets)
    ]
