"""The samples of one step, from their own hashed file."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace

from lorad.bounds import ANSWER_BYTES, SAMPLE_TEXT, SAMPLES_BYTES
from lorad.client.shapes import Sample
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context, spec_of
from lorad.daemon.pools.as_owner import on_behalf
from lorad.errors import IntegrityError, NotFound
from lorad.files import read_file
from lorad.spec.kept import MAIN
from lorad.store import runs
from lorad.store.metrics import evals, samples_file
from lorad.store.rows import EvalRow, RunRow

_DECODER = msgspec.json.Decoder(Sample)


async def list_samples(ctx: Context, call: Call) -> list[Sample]:
    """Read the samples of `step`, by default the run's last one, if there is one.

    eval: a set of problems, whose completions are read instead. problem: only those of one problem, by its
    number, at all steps. Raises NotFound, IntegrityError.
    """
    run, limit = runs.get(ctx.store, call.run), call.number("limit", 1000)
    if (name := call.text("eval")) is not None:
        return await _list_completions(ctx, call, run, name, limit)
    step = call.number("step", run.step)
    if call.text("step") is None and step == 0:
        return []
    samples = samples_file(ctx.store, call.run, step)
    if samples is None:
        raise NotFound(f"run {call.run} has no step {step}", hint=f"Its last step is {run.step}.")
    path = run.dir.root / samples.path
    return await on_behalf(ctx, run.owner_uid, _read, path, samples.sha256, limit)


async def _list_completions(ctx: Context, call: Call, run: RunRow, name: str, limit: int) -> list[Sample]:
    known = {MAIN, *spec_of(run).eval.sets}
    if name not in known:
        hint = f"Its sets: {', '.join(sorted(known))}."
        raise NotFound(f"run {run.name} evaluates no set {name[:80]}", hint=hint)
    rows = [row for row in await ctx.read(evals, run.name) if row.samples and _has(row, name)]
    problem = call.number("problem", 0)
    if call.text("step") is not None:
        step, steps = call.number("step", -1), ", ".join(str(row.step) for row in rows) or "none"
        rows = [row for row in rows if row.step == step]
        if not rows:
            hint = f"There are some of steps: {steps}."
            raise NotFound(f"run {run.name} has no completions of {name} at step {step}", hint=hint)
    files = [(run.dir.root / row.samples, row.samples_sha256) for row in rows]
    if problem:
        return await on_behalf(ctx, run.owner_uid, _follow, files, name, problem, limit)
    if not files:
        return []
    return await on_behalf(ctx, run.owner_uid, _read, *files[-1], limit, name)


def _has(row: EvalRow, name: str) -> bool:
    return row.problems > 0 if name == MAIN else name in row.sets


def _follow(files: Sequence[tuple[Path, str]], name: str, problem: int, limit: int) -> list[Sample]:
    """Read the completions of one problem, in order of steps. Evaluations whose completions were deleted are
    left out.

    Raises NotFound where the newest evaluation has no such problem.
    """
    found: list[list[Sample]] = []
    wanted = ""
    for path, sha256 in reversed(files):
        if not path.exists():
            continue
        samples = _read(path, sha256, SAMPLES_BYTES, name)
        if not wanted:
            last = max((one.problem or 0 for one in samples), default=0)
            wanted = next((one.prompt_id for one in samples if one.problem == problem), "")
            if not wanted:
                hint = f"They are numbered from 1 to {last}."
                raise NotFound(f"{name} has no problem {problem}", hint=hint)
        found.append([one for one in samples if one.prompt_id == wanted])
    return [one for group in reversed(found) for one in group][: max(limit, 0)]


def _read(path: Path, sha256: str, limit: int, name: str = "") -> list[Sample]:
    """Read the first `limit` samples of a file, whose digest is checked first. name: only those of this
    set.
    """
    try:
        data = read_file(path, SAMPLES_BYTES, links=False)
    except OSError as error:
        hint = f"checkpoint.{'keep_evals' if name else 'keep_samples'} says how many steps keep theirs."
        raise NotFound(f"{path}: {error.strerror}", hint=hint) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise IntegrityError(
            f"{path}: changed bytes: its sha256 is not that of the journal", hint="Do not rely on it."
        )
    mark = b'{"set":' + msgspec.json.encode(name) if name else b""  # lines begin with their set
    lines = [line for line in data.splitlines() if line.startswith(mark)]
    try:
        return list(_shown(lines[: max(limit, 0)]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{path}: not lines of JSON: {error}", hint="Who wrote it?") from None


def _shown(lines: Sequence[bytes]) -> Iterator[Sample]:
    """Yield as many samples as fit into an answer, with long texts cut."""
    size = 0
    for line in lines:
        if (size := size + min(len(line), 2 * SAMPLE_TEXT)) > ANSWER_BYTES:
            return
        sample = _DECODER.decode(line)
        if len(line) > SAMPLE_TEXT:
            long = {key: value for key, value in asdict(sample).items() if isinstance(value, str)}
            sample = replace(sample, **{key: _cut(value) for key, value in long.items()})
        yield sample


def _cut(value: str) -> str:
    return value[:SAMPLE_TEXT] + "…" if len(value) > SAMPLE_TEXT else value
