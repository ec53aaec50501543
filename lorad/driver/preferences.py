"""The objective of dpo.

Log-probabilities of the reference are computed once for each row; the policy's come from the pass that makes
the gradient, where the trainer can do that.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from lorad.driver.session import Session
from lorad.driver.supervised import LINEAR, Metrics, batch_of, is_wanted, likelihood_of, trained_of
from lorad.driver.update import Update, update
from lorad.driver.weigh import logprobs, predictions
from lorad.files import write_whole
from lorad.protocol.batch import OF_PAIRS, Batch, Gradients, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward, LogprobsOf
from lorad.protocol.status import PoolInfo
from lorad.rl.completions.targets import TargetDataset
from lorad.rl.data import Example
from lorad.rl.pairs import PreferenceOutcome, mismatched_divergence, preference_loss


class Preferences:
    """Pairs, or completions with a label (kto)."""

    def __init__(self, session: Session, info: PoolInfo) -> None:
        """Raises OSError when the file of log-probabilities cannot be made."""
        self._preference = session.spec.algorithm.preference
        self._of: LogprobsOf = "reference" if session.params.reference else "base"
        self._knows_pairs = OF_PAIRS in info.losses
        self._kept: _LogprobsFile | None = None
        if session.spec.algorithm.has_reference:
            assert isinstance(session.train_data, TargetDataset)
            reference = session.params.reference
            about = f"reference {reference.sha256}" if reference else info.model_sha256 or info.base_checksum
            name = hashlib.sha256(f"{about} {session.train_data.tokens_digest}".encode()).hexdigest()
            directory = session.run_dir.reference_logprobs
            directory.mkdir(exist_ok=True)
            self._kept = _LogprobsFile(directory / f"{name[:32]}.f32", session.train_data.lengths)

    def learn(self, session: Session, examples: Sequence[Example], rate: float) -> tuple[Update, Metrics]:
        batch = batch_of(examples)
        reference = np.zeros(batch.targets.size, np.float32)
        if self._kept is not None:
            assert isinstance(session.train_data, TargetDataset)
            places = session.train_data.places(session.state.position, len(examples))
            if not all(self._kept.has(place) for place in places):
                computed = logprobs(session, self._of, batch)
                sizes = accumulate(sum(t.tokens.size for t in e.targets) for e in examples)
                for place, part in zip(places, np.split(computed, [*sizes][:-1]), strict=True):
                    self._kept.put(place, part)
            reference = np.concatenate([self._kept.at(place) for place in places])
        # where each pair fits into a micro-batch, the pass that makes the gradient can find the loss, too
        ends = np.cumsum(batch.completion_lengths)[np.cumsum(batch.group_sizes) - 1]
        rows = batch.prompt_lengths + np.diff(ends, prepend=0)
        if not self._knows_pairs or int(rows.max()) > session.tokens_per_microbatch:
            outcome = self._outcome(session, examples, logprobs(session, "slot", batch), reference)
            targets = PolicyTargets((-outcome.gradient).astype(np.float32), weights=trained_of(examples))
            work = ForwardBackward(batch, targets, LINEAR, 1.0)
            done = update(session, work, rate, has_gradient=bool(targets.advantages.any()))
            return done, self._metrics(session, examples, outcome)
        loss = PolicyLoss(
            "preference",
            temperature=session.spec.rollout.temperature,
            returns_logprobs=True,
            preference=self._preference,
        )
        signs = np.ones(batch.targets.size, np.float32)
        if self._preference.loss == "kto":
            signs = np.repeat(np.where(_desired(session, examples), 1, -1), batch.completion_lengths)
            loss = replace(loss, divergence=self._divergence(session, examples))
        outcomes: list[PreferenceOutcome] = []

        def has_gradient(stats: Gradients) -> bool:
            assert stats.logprobs is not None
            outcomes.append(self._outcome(session, examples, stats.logprobs, reference, loss.divergence))
            return bool(outcomes[0].gradient.any())

        targets = PolicyTargets(
            signs.astype(np.float32), reference_logprobs=reference, weights=trained_of(examples)
        )
        work = ForwardBackward(batch, targets, loss, float(len(examples)))
        done = update(session, work, rate, has_gradient=has_gradient)
        return done, self._metrics(session, examples, outcomes[0]) if outcomes else {}

    def held_out(self, session: Session) -> Metrics:
        examples = [example for example in session.held_out if example.targets]
        if not examples:
            return {}
        batch = batch_of(examples)
        likely = predictions(session, "slot", batch)
        current = likely.logprobs
        reference = logprobs(session, self._of, batch) if self._kept is not None else np.zeros_like(current)
        metrics = self._metrics(session, examples, self._outcome(session, examples, current, reference))
        if (likelihood := likelihood_of(session, examples, likely)) is not None:
            metrics |= {key: value for key, value in likelihood._asdict().items() if value is not None}
        return {f"held_out_{key}": value for key, value in metrics.items()}

    def _outcome(
        self,
        session: Session,
        examples: Sequence[Example],
        current: np.ndarray,
        reference: np.ndarray,
        divergence: float | None = None,
    ) -> PreferenceOutcome:
        """Compute loss and gradient. divergence: z of kto; None where it is to be measured."""
        lengths = np.array([t.tokens.size for e in examples for t in e.targets])
        trained = trained_of(examples)
        if self._preference.loss != "kto":
            return preference_loss(current, reference, lengths, self._preference, trained)
        if divergence is None:
            divergence = self._divergence(session, examples)
        desired = _desired(session, examples)
        return preference_loss(current, reference, lengths, self._preference, trained, desired, divergence)

    def _divergence(self, session: Session, examples: Sequence[Example]) -> float:
        """Measure z of kto on the completions of the step behind the prompts of others."""
        shifted = [*examples[1:], examples[0]]
        batch = Batch.of(
            [
                (np.array(other.tokens, np.int32), [t.tokens for t in e.targets])
                for e, other in zip(examples, shifted, strict=True)
            ]
        )
        current, reference = (logprobs(session, of, batch) for of in ("slot", self._of))
        return mismatched_divergence(current, reference, batch.completion_lengths, trained_of(examples))

    def _metrics(self, session: Session, examples: Sequence[Example], outcome: PreferenceOutcome) -> Metrics:
        """Collect, beside the loss, means over the chosen and over the rejected completions."""
        counts = np.array([t.trained.sum() for e in examples for t in e.targets])
        by_token = outcome.shifts / counts
        is_paired = self._preference.loss != "kto"
        chosen = np.arange(counts.size) % 2 == 0 if is_paired else _desired(session, examples)
        values = {"loss": outcome.loss}
        if is_paired:
            values["pair_accuracy"] = float((outcome.rewards[0::2] > outcome.rewards[1::2]).mean())
        name = "logprob" if self._preference.loss == "simpo" else "shift"
        for side, of_side in (("chosen", chosen), ("rejected", ~chosen)):
            if of_side.any():
                values[f"{side}_reward"] = float(outcome.rewards[of_side].mean())
                values[f"{side}_{name}"] = float(by_token[of_side].mean())
        if {"chosen_reward", "rejected_reward"} <= values.keys():
            values["reward_margin"] = values["chosen_reward"] - values["rejected_reward"]
        return values


class _LogprobsFile:
    """Log-probabilities of each row in a file; NaN is not computed yet.

    The file is whole on disk, all NaN, before it has its name. After a loss of power each number is NaN or
    the one that was put, and a row with a NaN is computed again as a whole.
    """

    def __init__(self, path: Path, lengths: np.ndarray) -> None:
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        if not path.exists() or path.stat().st_size != 4 * self._ends[-1]:
            write_whole(path, np.full(self._ends[-1], np.nan, "<f4").tobytes())
        self._values = np.memmap(path, "<f4", "r+")

    def has(self, place: int) -> bool:
        return not np.isnan(self.at(place)).any()

    def at(self, place: int) -> np.ndarray:
        """Return the log-probabilities of the completions of a row, float32."""
        return np.array(self._values[self._starts[place] : self._ends[place]], np.float32)

    def put(self, place: int, values: np.ndarray) -> None:
        """Keep the log-probabilities of a row, unless they are all there."""
        if not self.has(place):
            self._values[self._starts[place] : self._ends[place]] = values


def _desired(session: Session, examples: Sequence[Example]) -> np.ndarray:
    """Return which completions are labelled as good, bool [S]; rows of kto have one completion each."""
    return np.array([is_wanted(session, e, 0) for e in examples])
