"""The samples of one step, from their own hashed file."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace

from lorad.bounds import ANSWER_BYTES, SAMPLE_TEXT, SAMPLES_BYTES
from lorad.client.shapes import Sample
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import on_behalf
from lorad.errors import IntegrityError, NotFound
from lorad.files import read_file
from lorad.store import runs
from lorad.store.metrics import samples_file

_DECODER = msgspec.json.Decoder(Sample)


async def list_samples(ctx: Context, call: Call) -> list[Sample]:
    """Read the samples of `step`, by default the run's last one, if there is one.

    Raises NotFound, IntegrityError.
    """
    run = runs.get(ctx.store, call.run)
    step = call.number("step", run.step)
    if call.text("step") is None and step == 0:
        return []
    samples = samples_file(ctx.store, call.run, step)
    if samples is None:
        raise NotFound(f"run {call.run} has no step {step}", hint=f"Its last step is {run.step}.")
    path = run.dir.root / samples.path
    return await on_behalf(ctx, run.owner_uid, _read, path, samples.sha256, call.number("limit", 1000))


def _read(path: Path, sha256: str, limit: int) -> list[Sample]:
    """Read the first `limit` samples of a file, whose digest is checked first."""
    try:
        data = read_file(path, SAMPLES_BYTES, links=False)
    except OSError as error:
        raise NotFound(
            f"{path}: {error.strerror}", hint="checkpoint.keep_samples says how many steps keep theirs."
        ) from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise IntegrityError(
            f"{path}: changed bytes: its sha256 is not that of the journal", hint="Do not rely on it."
        )
    try:
        return list(_shown(data.splitlines()[: max(limit, 0)]))
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
