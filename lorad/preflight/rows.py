"""Doubts about the rows of a run: what is probably not meant, and what a reward misses in them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lorad.preflight.answers import Sampling, answer_doubts
from lorad.preflight.telling import begin
from lorad.rl.completions.formats import format_of, label_of
from lorad.rl.completions.targets import TargetDataset
from lorad.rl.data import Dataset, Example, RowDataset, rows_behind
from lorad.rl.rows.doubts import are_chats, listed, row_doubts
from lorad.rl.rows.pairs import Judgement, preference_doubts
from lorad.rl.sources import SUFFIXES, Row
from lorad.rl.tasks import TASKS
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import labels_of, names_of, single
from lorad.spec.model import Spec

TRIED = 4  # rows for which completions are made up
_UNSHOWN = (
    "the chat template does not write it, so that the model does not see it; write it as the template does, "
    "or leave it out"
)


class JudgedRows(NamedTuple):
    """Holds rows that one reward or environment judges, the run's or that of their source.

    spec: the spec as it holds for them.
    source: the label of the source; "" for the run.
    rows: the rows that are trained on.
    first: the first rows whose samples are scored.
    has_answers: whether they have answers.
    """

    spec: Spec
    source: str
    rows: Sequence[Row]
    first: list[Example]
    held_out: list[Example]
    has_answers: bool


def check_rows(
    spec: Spec, data: Dataset, held_out: Sequence[Example], tokenizer: Tokenizer, *, is_scored: bool
) -> list[str]:
    """Return warnings about the rows that are trained on, and about the held-out ones.

    is_scored: whether held-out samples have a reward.
    """
    begin("looking at the rows")
    warnings = [*_on_trained_rows(spec)]
    if held_out and not is_scored and not any(example.targets for example in held_out):
        keys = "chosen_key and rejected_key" if spec.algorithm.kind == "preference" else "completion_key"
        warnings.append(
            f"data.eval: its rows have neither completions (data.{keys}) nor what the reward needs "
            "(data.answer_key), so that nothing is measured of them"
        )
    sampled = Sampling(spec.rollout.max_new_tokens, spec.rollout.stop)
    has_rows = spec.data.eval is not None and single(spec.data.eval) not in TASKS
    for part in judged_rows(spec, data, held_out):
        of_eval = rows_behind(part.held_out) if is_scored and has_rows else []
        trained = part.rows if spec.algorithm.kind == "rl" else []
        is_played = part.spec.env.name is not None
        for key, rows in () if is_played else (("data.train", trained), ("data.eval", of_eval)):
            warnings += answer_doubts(key, rows, spec.data, part.spec.rewards, sampled, tokenizer)
    if spec.algorithm.kind == "preference" and isinstance(data, TargetDataset):
        warnings += preference_doubts("data.train", data.judgements(), spec.data)
        examples = [example for example in held_out if example.targets]
        judgements = (
            Judgement(
                row,
                np.array(example.tokens, np.int32),
                tuple(target.tokens for target in example.targets),
                label_of(row, spec.data) if spec.algorithm.preference.loss == "kto" else None,
            )
            for row, example in zip(rows_behind(examples), examples, strict=True)
        )
        warnings += preference_doubts("data.eval", judgements, spec.data)
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


def judged_rows(spec: Spec, data: Dataset, held_out: Sequence[Example]) -> Iterator[JudgedRows]:
    """Yield the rows that the run judges, if there are any, and those of each source that says how itself."""
    of_sources = spec.of_sources
    is_rl = spec.algorithm.kind == "rl"
    evaluated = [example for example in held_out if ("eval", example.source) not in of_sources]
    own = {label for side, label in of_sources if side == "train"}
    labels = [*labels_of(spec.data.train).values()]
    rows: Sequence[Row] = data.rows
    if isinstance(data, RowDataset) and own:
        rows, first = data.part([label for label in labels if label not in own], TRIED)
        has_answers = any(example.answer for example in first)
    else:
        first = data.take(0, min(TRIED, data.size or TRIED)) if is_rl else []
        has_answers = data.has_answers
    if first or evaluated or not own:
        tried = first or evaluated[:TRIED]
        answered = has_answers if first else any(example.answer for example in tried)
        yield JudgedRows(spec, "", rows, tried, evaluated, has_answers=answered)
    for (side, label), part in of_sources.items():
        evaluated = [example for example in held_out if side == "eval" and example.source == label]
        rows, first = (
            data.part([label], TRIED) if side == "train" and isinstance(data, RowDataset) else ([], [])
        )
        first = first or evaluated[:TRIED]
        if first:
            answered = any(example.answer for example in first)
            yield JudgedRows(part, label, rows, first, evaluated, has_answers=answered)


def _on_trained_rows(spec: Spec) -> Iterator[str]:
    """Yield a warning for each evaluation on a file that is trained on."""
    files = [name for name in names_of(spec.data.train) if Path(name).suffix.lower() in SUFFIXES]
    trained = {os.path.normpath(name) for name in files}
    sets = {f"eval.sets.{name}.data": one.data for name, one in spec.eval.sets.items()}
    for key, sources in {"data.eval": spec.data.eval, **sets}.items():
        for name in names_of(sources):
            if os.path.normpath(name) in trained:
                yield f"{key}: {name} is trained on, so that its rows are not held out"
