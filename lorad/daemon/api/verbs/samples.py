"""The samples of one step, from their own hashed file."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from lorad.bounds import ANSWER_BYTES, SAMPLE_TEXT, SAMPLES_BYTES
from lorad.client.choice import Choice, in_order, ordered_by
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context, spec_of
from lorad.daemon.pools.as_owner import on_behalf
from lorad.errors import IntegrityError, NotFound
from lorad.files import read_file
from lorad.records.samples import Sample
from lorad.spec.kept import MAIN
from lorad.store import runs
from lorad.store.metrics import evals, samples_file
from lorad.store.rows import RunRow

_DECODER = msgspec.json.Decoder(Sample)
_TOKEN = 32  # bytes of a token and its log-probability in an answer, about


class _Excerpt(NamedTuple):
    """The part of a file of samples that is read.

    limit: how many samples at most.
    name: the set of problems of an evaluation; "" for samples of training.
    choice: which samples, and in what order.
    prompt: an id, or a number from 1 in the order of the file; "" for all prompts.
    is_brief: tokens and log-probabilities are left out.
    """

    limit: int
    name: str = ""
    choice: Choice = Choice()
    prompt: str | int = ""
    is_brief: bool = False


async def list_samples(ctx: Context, call: Call) -> list[Sample]:
    """Read the samples of `step`, by default the run's last one, if there is one. The query has the keywords
    of `Client.samples`. Raises NotFound, IntegrityError, SpecError.
    """
    run = runs.get(ctx.store, call.run)
    sort = ordered_by(call.text("sort") or "drawn")
    choice = Choice(call.text("where") or "", sort, call.number("reverse", 0) != 0)
    choice.test()  # refuses a word that is not understood
    excerpt = _Excerpt(
        limit=max(call.number("limit", 1000), 0),
        name=call.text("eval") or "",
        choice=choice,
        prompt=call.text("prompt_id") or max(call.number("problem", 0), 0) or "",
        is_brief=call.number("brief", 0) != 0,
    )
    if excerpt.name:
        return await _list_completions(ctx, call, run, excerpt, follows=isinstance(excerpt.prompt, int))
    step = call.number("step", run.step)
    if call.text("step") is None and step == 0:
        return []
    samples = samples_file(ctx.store, call.run, step)
    if samples is None:
        raise NotFound(f"run {call.run} has no step {step}", hint=f"Its last step is {run.step}.")
    if not samples.path:
        return []
    path = run.dir.root / samples.path
    return await on_behalf(ctx, run.owner_uid, _read, path, samples.sha256, excerpt)


async def _list_completions(
    ctx: Context, call: Call, run: RunRow, excerpt: _Excerpt, *, follows: bool
) -> list[Sample]:
    """Read the completions of an evaluation, at the step of the query or the last one.

    follows: read those of one problem at all steps instead.
    """
    sets = {MAIN, *spec_of(run).eval.sets}
    name = excerpt.name
    if name not in sets:
        hint = f"Its sets: {', '.join(sorted(sets))}."
        raise NotFound(f"run {run.name} evaluates no set {name[:80]}", hint=hint)
    rows = [
        row
        for row in await ctx.read(evals, run.name)
        if row.samples and (row.problems > 0 if name == MAIN else name in row.sets)
    ]
    if call.text("step") is not None:
        step = call.number("step", -1)
        steps = ", ".join(str(row.step) for row in rows) or "none"
        rows = [row for row in rows if row.step == step]
        if not rows:
            hint = f"There are some of steps: {steps}."
            raise NotFound(f"run {run.name} has no completions of {name} at step {step}", hint=hint)
    files = [(run.dir.root / row.samples, row.samples_sha256) for row in rows]
    if follows:
        return await on_behalf(ctx, run.owner_uid, _follow, files, excerpt)
    if not files:
        return []
    return await on_behalf(ctx, run.owner_uid, _read, *files[-1], excerpt)


def _follow(files: Sequence[tuple[Path, str]], excerpt: _Excerpt) -> list[Sample]:
    """Read the completions of one problem, in order of steps, where they still exist. Raises NotFound."""
    groups: list[list[Sample]] = []
    for path, sha256 in reversed(files):
        if path.exists():
            groups.append(_read(path, sha256, excerpt._replace(limit=SAMPLES_BYTES)))
            if isinstance(excerpt.prompt, int) and groups[0]:
                excerpt = excerpt._replace(prompt=groups[0][0].prompt_id)
    return [one for group in reversed(groups) for one in group][: excerpt.limit]


def _read(path: Path, sha256: str, excerpt: _Excerpt) -> list[Sample]:
    """Read samples of a file, whose digest is checked first. Raises NotFound, IntegrityError, SpecError."""
    try:
        data = read_file(path, SAMPLES_BYTES, links=False)
    except OSError as error:
        key = "keep_evals" if excerpt.name else "keep_samples"
        hint = f"checkpoint.{key} says how many steps keep theirs."
        raise NotFound(f"{path}: {error.strerror}", hint=hint) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        message = f"{path}: changed bytes: its sha256 is not that of the journal"
        raise IntegrityError(message, hint="Do not rely on it.")
    # lines of an evaluation begin with their set
    mark = b'{"set":' + msgspec.json.encode(excerpt.name) if excerpt.name else b""
    lines = [line for line in data.splitlines() if line.startswith(mark)]
    try:
        return list(_fit_answer(_choose(lines, excerpt), excerpt))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{path}: not lines of JSON: {error}", hint="Who wrote it?") from None


class _SampleLine(NamedTuple):
    """What a line of a file is ordered by.

    number: the place of its prompt among the prompts of the file, from 1.
    """

    place: int
    number: int
    prompt_id: str
    reward: float | None
    advantage: float | None
    size: int
    turn_count: int


def _choose(lines: Sequence[bytes], excerpt: _Excerpt) -> Iterator[Sample]:
    """Yield the samples of the excerpt in order, one by one. Raises NotFound for an unknown prompt."""
    places: Iterable[int] = range(len(lines))
    if excerpt.choice != Choice() or excerpt.prompt:
        fitting = list[_SampleLine]()
        numbers = dict[str, int]()
        takes = excerpt.choice.test()
        for place, sample in enumerate(map(_DECODER.decode, lines)):
            number = numbers.setdefault(sample.prompt_id, sample.problem or len(numbers) + 1)
            if takes(sample):
                amounts = (sample.reward, sample.advantage, sample.size, sample.turn_count)
                fitting.append(_SampleLine(place, number, sample.prompt_id, *amounts))
        if isinstance(excerpt.prompt, int) and excerpt.prompt not in numbers.values():
            last = max(numbers.values(), default=0)
            what = f"{excerpt.name} has no problem" if excerpt.name else "that step has no prompt"
            raise NotFound(f"{what} {excerpt.prompt}", hint=f"They are numbered from 1 to {last}.")
        of_prompt = [line for line in fitting if excerpt.prompt in ("", line.number, line.prompt_id)]
        places = [line.place for line in in_order(of_prompt, excerpt.choice)]
    yield from (_DECODER.decode(lines[place]) for place in itertools.islice(places, excerpt.limit))


def _fit_answer(samples: Iterable[Sample], excerpt: _Excerpt) -> Iterator[Sample]:
    """Yield as many samples as fit into an answer, with long texts cut."""
    size = 0
    for sample in samples:
        shown = sample
        if excerpt.is_brief:
            logprobs = [value for value in sample.logprobs if value is not None]
            has_all = bool(logprobs) and len(logprobs) == len(sample.logprobs)
            mean = sum(logprobs) / len(logprobs) if has_all else None
            shown = replace(sample, length=sample.size, logprob=mean)
            shown = replace(shown, tokens=[], logprobs=[], widths=[], forks=[])
        texts = {key: value for key, value in asdict(shown).items() if isinstance(value, str)}
        long = {key: value[:SAMPLE_TEXT] + "…" for key, value in texts.items() if len(value) > SAMPLE_TEXT}
        size += sum(min(len(value), SAMPLE_TEXT) for value in texts.values()) + _TOKEN * len(shown.tokens)
        size += sum(len(turn.text) + len(turn.observation) for turn in shown.turns)
        if size > ANSWER_BYTES:
            return
        yield replace(shown, **long) if long else shown
