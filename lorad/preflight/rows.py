"""What the rows of a run say: what is probably not meant, and which of them lack what a reward asks for."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lorad.preflight.answers import Sampling, answer_doubts
from lorad.preflight.telling import begin
from lorad.rl.completions.formats import format_of, label_of
from lorad.rl.completions.targets import TargetDataset
from lorad.rl.data import Dataset, Example, rows_behind
from lorad.rl.rows.doubts import are_chats, listed, row_doubts
from lorad.rl.rows.pairs import Judgement, preference_doubts
from lorad.rl.sources import SUFFIXES
from lorad.rl.tasks import TASKS
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import names_of, single
from lorad.spec.model import Spec

_UNSHOWN = (
    "the chat template does not write it, so that the model does not see it; write it as the template does, "
    "or leave it out"
)


def check_rows(
    spec: Spec, data: Dataset, held_out: Sequence[Example], tokenizer: Tokenizer, *, is_scored: bool
) -> list[str]:
    """Return warnings about the rows that are trained on, and about those of data.eval.

    is_scored: samples of what is held out have a reward.
    """
    begin("looking at the rows")
    warnings = [*_on_trained_rows(spec), *_on_no_figures(spec, held_out, is_scored)]
    sampled = Sampling(spec.rollout.max_new_tokens, spec.rollout.stop)
    has_rows = spec.data.eval is not None and single(spec.data.eval) not in TASKS
    scored = {
        "data.train": data.rows if spec.algorithm.kind == "rl" else (),
        "data.eval": rows_behind(held_out) if is_scored and has_rows else (),
    }
    for key, rows in scored.items() if spec.env.name is None else ():
        warnings += answer_doubts(key, rows, spec.data, spec.rewards, sampled, tokenizer)
    if spec.algorithm.kind == "preference" and isinstance(data, TargetDataset):
        warnings += preference_doubts("data.train", data.judgements(), spec.data)
        warnings += preference_doubts("data.eval", _judged(spec, held_out), spec.data)
    if not are_chats(spec, spec.data, tokenizer):
        return warnings
    form = data.form if isinstance(data, TargetDataset) else None
    warnings += row_doubts("data.train", data.rows, spec.data, form)
    if data.unshown:
        warnings.append(f"data.train: {listed(data.unshown)}: {_UNSHOWN}")
    if has_rows and held_out:
        rows = rows_behind(held_out)
        form = format_of(rows[0], spec.data, spec.algorithm) if held_out[0].targets else None
        warnings += row_doubts("data.eval", rows, spec.data, form)
    return warnings


def _judged(spec: Spec, held_out: Sequence[Example]) -> Iterator[Judgement]:
    """Yield the preferences that are held out."""
    examples = [example for example in held_out if example.targets]
    for row, example in zip(rows_behind(examples), examples, strict=True):
        label = label_of(row, spec.data) if spec.algorithm.preference.loss == "kto" else None
        prompt = np.array(example.tokens, np.int32)
        yield Judgement(row, prompt, tuple(target.tokens for target in example.targets), label)


def _on_trained_rows(spec: Spec) -> Iterator[str]:
    """Yield a warning for each evaluation on a file that is trained on."""
    files = [name for name in names_of(spec.data.train) if Path(name).suffix.lower() in SUFFIXES]
    trained = {os.path.normpath(name) for name in files}
    sets = {f"eval.sets.{name}.data": one.data for name, one in spec.eval.sets.items()}
    for key, sources in {"data.eval": spec.data.eval, **sets}.items():
        for name in names_of(sources):
            if os.path.normpath(name) in trained:
                yield f"{key}: {name} is trained on, so that its rows are not held out"


def _on_no_figures(spec: Spec, held_out: Sequence[Example], is_scored: bool) -> Iterator[str]:
    """Yield a warning for held-out rows that have nothing to be measured by."""
    if held_out and not is_scored and not any(example.targets for example in held_out):
        keys = "chosen_key and rejected_key" if spec.algorithm.kind == "preference" else "completion_key"
        yield (
            f"data.eval: its rows have neither completions (data.{keys}) nor what the reward needs "
            "(data.answer_key), so that nothing is measured of them"
        )
