"""Try rewards on completions that are there: the saved samples of a run, or lines that somebody wrote."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from lorad.client.client import Client
from lorad.client.evaluate import Graded, Grading
from lorad.driver.rewards import Rewarder
from lorad.errors import Conflict, SpecError
from lorad.models.directory import resolve
from lorad.records.samples import Sample
from lorad.rl.data import name_of, prompt_value_of, rows_of
from lorad.rl.reward import RewardInput, renamed
from lorad.rl.rows.columns import find_value, text_of
from lorad.rl.sources import Row, json_lines
from lorad.rl.tasks import TASKS
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data, single
from lorad.spec.model import convert

_MOST = 10_000  # completions
_FORM = "A line is a row of the data with `completion`, a text, or `completions`, a list of texts."


class _Ungraded(NamedTuple):
    """A completion that has no reward yet, what functions get of it, and whether its line has a prompt."""

    sample: Sample
    input: RewardInput
    has_prompt: bool = True


def grade(grading: Grading) -> Graded:
    """Score completions with the rewards of a spec, each prompt's as a group, as in a run.

    Raises SpecError for a line or a reward that cannot be, and what the daemon raises.
    """
    spec = convert(grading.spec)
    if spec.env.name is not None:
        problem = f"episodes of {spec.env.name} have the reward that it gives"
        raise SpecError(problem, key="env.name", hint="`lorad try` without --rewards plays some.")
    if grading.run:
        prompts = _saved(grading.run, grading.step)
    else:  # lines with equal prompts behind each other belong together
        rows = json_lines((line.encode() for line in grading.lines.split("\n")), "<stdin>")
        written = (completion for row in rows for completion in _of_line(row, spec.data))
        by_prompt = groupby(written, lambda item: item.input.prompt_value or item.sample.prompt_id)
        prompts = ([*group] for _, group in by_prompt)
    groups = [*islice(prompts, grading.n)]
    flat = [completion for group in groups for completion in group]
    if not 0 < len(flat) <= _MOST:
        raise SpecError(f"there are {len(flat)} completions, not 1 to {_MOST:,}", hint=_FORM)
    with Rewarder(spec.rewards, Path(grading.cwd)) as rewarder:
        for completion in flat:
            row = completion.input.row
            has_answer = completion.input.answer_value is not None
            lacking = rewarder.lacking(row, has_answers=has_answer, has_prompts=completion.has_prompt)
            for name, missing in lacking.items():
                prompt = completion.sample.prompt_id
                problem = f"{name} needs {', '.join(missing)}, which {prompt} does not have"
                more = f"Beside the completion there is {', '.join(row) or 'nothing else'}; "
                more += "data.answer_key names the column of answers."
                raise SpecError(problem, key="reward", hint=f"{renamed(missing)}{more}")
        inputs = [[completion.input for completion in group] for group in groups]
        if grading.run and rewarder.wants_raw:
            decode = partial(Tokenizer(resolve(spec.model.path)).decode, skip_special=False)
            inputs = [[replace(i, raw_completion=decode(i.completion_ids)) for i in g] for g in inputs]
        scores = rewarder.begin(inputs).scores()
    graded = [
        replace(completion.sample, reward=score.value, rewards=dict(score.parts), error=score.error or None)
        for completion, score in zip(flat, scores, strict=True)
    ]
    return Graded(samples=graded)


def _of_line(row: Row, data: Data) -> Iterator[_Ungraded]:
    """Yield the completions of a line. Raises SpecError."""
    columns = {key: value for key, value in row.values.items() if key not in ("completion", "completions")}
    finish = columns.pop("finish", "stop")
    texts = row.values.get("completions", [row.values.get("completion")])
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        keys = ", ".join(row.values) or "nothing"
        raise SpecError(f"{row.where}: it has no completion that is text; there is {keys}", hint=_FORM)
    if finish not in ("stop", "length"):
        hint = "It is stop, or length of one that is cut."
        raise SpecError(f"{row.where}: finish is {finish!r}", hint=hint)
    line = replace(row, values=columns)
    has_prompt = data.prompt_format is not None or find_value(line, data, "prompt_key") is not None
    value = prompt_value_of(line, data) if has_prompt else ""
    prompt = value if isinstance(value, str) else "\n".join(text_of(m["content"]) for m in value)
    answer = find_value(line, data, "answer_key")
    for index, text in enumerate(texts):
        input = RewardInput(
            prompt=prompt,
            completion=text,
            raw_completion=text,
            answer="" if answer is None else text_of(answer),
            finish=finish,
            row=columns,
            prompt_value=value,
            answer_value=answer,
        )
        sample = Sample(
            step=0,
            prompt_id=row.where,
            index=index,
            prompt=prompt,
            completion=text,
            answer=input.answer,
            finish=finish,
        )
        yield _Ungraded(sample, input, has_prompt)


def _saved(run: str, step: int | None) -> Iterator[list[_Ungraded]]:
    """Yield the saved samples of each prompt of a step, with the rows that they were made of.

    Raises Conflict for a run whose samples have none, SpecError where the data are no longer what they were.
    """
    client = Client()
    details = client.show(run)
    spec = convert(details.spec)
    if spec.algorithm.kind != "rl" or spec.env.name is not None:
        hint = "Only samples of prompts in the data can be graded again."
        raise Conflict(f"{run} has no samples that a reward function scored", hint=hint)
    samples = client.samples(run, step=step, limit=_MOST)
    source = spec.data.train
    names = {_row_of(sample) for sample in samples}
    rows = dict[str, Row]()  # none of a builtin task, whose rows have nothing but prompt and answer
    if single(source) not in TASKS:
        for row in rows_of(source, "train", spec.data, Path(details.cwd or ".")):
            name = f"{row.source or name_of(source)}/{row.number}"
            if name in names:
                rows[name] = row
                if len(rows) == len(names):
                    break
    for _, group in groupby(samples, lambda sample: sample.prompt_id):
        graded = []  # as they were scored first, but for the reward
        for sample in group:
            columns: dict[str, Any] = {"prompt": sample.prompt, "answer": sample.answer}
            value: Any = sample.prompt
            answer: Any = sample.answer
            if single(source) not in TASKS:
                its_row = rows.get(_row_of(sample))
                answer = None if its_row is None else find_value(its_row, spec.data, "answer_key")
                if its_row is None or (sample.answer and text_of(answer) != sample.answer):
                    problem = f"the data of {run} have changed: the row of {sample.prompt_id} is not there"
                    hint = "Give rows with completions: `--rewards -`."
                    raise SpecError(problem, key="data.train", hint=hint)
                columns = its_row.values
                value = prompt_value_of(its_row, spec.data)
            input = RewardInput(
                prompt=sample.prompt,
                completion=sample.completion,
                answer=sample.answer or "",
                finish=sample.finish or "stop",
                row=columns,
                completion_ids=sample.tokens,
                prompt_value=value,
                answer_value=answer,
            )
            graded.append(_Ungraded(sample, input))
        yield graded


def _row_of(sample: Sample) -> str:
    """Return what names its row: the id of a prompt without its epoch."""
    return sample.prompt_id.rpartition("/")[0]
