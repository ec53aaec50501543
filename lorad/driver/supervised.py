"""A step of sft: the likelihood of completions that the data hold. Nothing is sampled but evaluations.

Only what is evaluated, or in a checkpoint, is published.
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from lorad.driver import checkpoint
from lorad.driver.publish import publish_changes
from lorad.driver.record import count_skips, finish, trainer_metrics, write_samples
from lorad.driver.sample import evaluate, evaluation_due
from lorad.driver.session import Session
from lorad.driver.update import Update, current_rate, update
from lorad.driver.weigh import logprobs
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import StepFact
from lorad.rl.data import Example
from lorad.text import number

NLL = PolicyLoss("linear")  # with advantages of 1


def step(session: Session) -> None:
    """Train on the next rows, and record and evaluate that."""
    started = time.perf_counter()
    session.seconds = {}
    state, position, rate = session.state, session.state.position, current_rate(session)
    examples = session.train_data.take(position, session.spec.data.prompts_per_step)
    with session.timed("train"):
        done = update(session, _gradient(examples), rate)
    state.position += len(examples)
    if done.step is not None:
        state.changed = state.step + 1
    is_evaluated = evaluation_due(session, state.step + 1)
    if is_evaluated or checkpoint.is_due(session, state.step + 1):
        publish_changes(session, state.step + 1)
    nll = held_out_nll(session) if is_evaluated else None
    _record(session, examples, done, rate, position, nll, started)
    if is_evaluated:
        evaluate(session, nll)


def held_out_nll(session: Session) -> float | None:
    """Return the negative log-likelihood of the held-out completions, nats per token; None without any."""
    examples = [example for example in session.eval_data if example.targets]
    if not examples:
        return None
    HEART.work("evaluate")
    weights = _trained_of(examples)
    found = logprobs(session, "slot", _batch_of(examples))
    return float(-(found.astype(np.float64) * weights).sum() / weights.sum())


def _batch_of(examples: Sequence[Example]) -> Batch:
    """Return the completions of the examples, each example a group."""
    return Batch.of([(np.array(e.tokens, np.int32), [t.tokens for t in e.targets]) for e in examples])


def _trained_of(examples: Sequence[Example]) -> np.ndarray:
    """Return float32 [T]: 1 for the tokens of `_batch_of` that are trained, 0 for the others."""
    return np.concatenate([t.trained for e in examples for t in e.targets]).astype(np.float32)


def _gradient(examples: Sequence[Example]) -> ForwardBackward:
    weights = _trained_of(examples)
    targets = PolicyTargets(np.ones_like(weights), weights=weights)
    return ForwardBackward(_batch_of(examples), targets, NLL, float(weights.sum()))


def _record(
    session: Session,
    examples: Sequence[Example],
    done: Update,
    rate: float,
    position: int,
    nll: float | None,
    started: float,
) -> None:
    HEART.work("record")
    count_skips(session, [done])
    path, digest = write_samples(session, session.state.step + 1, _samples(session, examples))
    session.seconds["total"] = time.perf_counter() - started
    fact = StepFact(
        version=session.state.version,
        prompts=[e.id for e in examples],
        position=position,
        samples=path,
        samples_sha256=digest,
        metrics=_metrics(session, examples, done, rate, nll),
    )
    finish(session, fact, [done])
    told = {key: number(fact.metrics.get(key), 4) or "-" for key in ("loss", "perplexity")}
    print(
        f"step {session.state.step}/{session.params.steps}  loss {told['loss']}  ppl {told['perplexity']}  "
        f"lr {rate:.3g}  version {session.state.version}  {fact.metrics['tokens_per_second']:.0f} tok/s  "
        f"{session.seconds['total']:.2f} s",
        flush=True,
    )


def _metrics(
    session: Session, examples: Sequence[Example], done: Update, rate: float, nll: float | None
) -> dict[str, float]:
    """Collect what was measured; seconds are wall time.

    loss: nll per trained token. entropy: mean over the tokens of all completions. tokens: prompts included.
    trained_tokens: those that have a loss. held_out_loss: as the loss, of the eval's completions.
    """
    seconds, state = session.seconds, session.state
    tokens = sum(len(e.tokens) + sum(t.tokens.size for t in e.targets) for e in examples)
    values = {
        "lr": rate,
        "updates": float(done.step is not None),
        "skipped_updates": float(not done.is_finite),
        "skipped_updates_total": float(state.skipped_updates),
        "tokens": float(tokens),
        "trained_tokens": float(sum(t.trained.sum() for e in examples for t in e.targets)),
        "tokens_per_second": tokens / max(seconds["train"], 1e-9),
        "seconds": seconds["total"],
    }
    if done.stats is not None:
        values |= _likelihood("loss", "perplexity", done.stats.loss)
        values["entropy"] = done.stats.entropy / done.stats.tokens
    if nll is not None:
        values |= _likelihood("held_out_loss", "held_out_perplexity", nll)
    if done.step is not None:
        values |= {"grad_norm": done.step.grad_norm, "seconds_waited": done.step.waited}
        values |= trainer_metrics([done.step])
    return values | {f"seconds_{v}": s for v, s in seconds.items() if v != "total"}


def _likelihood(loss: str, perplexity: str, nll: float) -> dict[str, float]:
    return {loss: nll, perplexity: math.exp(min(nll, 99.0))}


def _samples(session: Session, examples: Sequence[Example]) -> list[dict[str, object]]:
    return [
        {
            "step": session.state.step + 1,
            "version": session.name_of(session.state.version),
            "prompt_id": e.id,
            "index": index,
            "prompt": e.prompt,
            "completion": session.tokenizer.completion(target.tokens.tolist(), ()),
            "answer": e.answer,
            "tokens": target.tokens.tolist(),
        }
        for e in examples
        for index, target in enumerate(e.targets)
    ]
