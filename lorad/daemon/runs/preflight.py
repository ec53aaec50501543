"""Ask a process of its own whether a spec can run with its model, its data and its reward: the daemon imports
none of the user's code.
"""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

import msgspec

from lorad.bounds import CHECK_BYTES
from lorad.box import config
from lorad.children import guard
from lorad.children.ask import under_guard
from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.causes import in_words_of
from lorad.daemon.process.commands import secrets_of
from lorad.daemon.process.doing import doing
from lorad.daemon.process.enter import UNREADABLE
from lorad.errors import SpecError, from_wire
from lorad.protocol.preflight import PreflightLine, SpecFacts, SpecQuestion
from lorad.records.requests import RunRequest, TrialRequest
from lorad.spec.model import Spec
from lorad.spec.text import places

_DOING_BYTES = 1 << 12  # of a line that says what a check is doing
_DOING_CHARACTERS = 100  # of it that people see
_PRINTED_BYTES = 16 << 20  # user code may print, too, while it is imported
_FORGED = "Does the reward module write where only lorad answers?"


async def preflight(
    ctx: Context,
    spec: Spec,
    cwd: str,
    uid: int,
    reference: Path | None = None,
    *,
    body: RunRequest | TrialRequest | None = None,
    look: bool = False,
) -> SpecFacts:
    """Check a spec as the user of `uid`, the run's owner, and return the facts of it.

    It reads `config.yaml` as that is now; from then on the daemon goes by the same backends and cluster.

    reference: where the adapter lies that KL is measured against.
    body: the request with the spec as the user wrote it; without it no key of `lora` is open.
    look: whether the data are to be described, too.

    Raises what the check raised, SpecError when it takes too long or falls over, and Conflict when too many
    of that user's checks wait.
    """
    written: dict[str, str] | None = None
    if body is not None and spec.lora.adapter_path is not None:
        written = await in_thread(ctx, uid, places, "lora", body.spec, body.source, body.overrides)
    doing().tell("checking the spec")
    async with ctx.users.checks.turn(uid):
        return await _checked(ctx, spec, cwd, uid, reference, written, look=look)


async def _checked(
    ctx: Context,
    spec: Spec,
    cwd: str,
    uid: int,
    reference: Path | None,
    written: dict[str, str] | None,
    *,
    look: bool,
) -> SpecFacts:
    """Ask a process about the spec, as `preflight` says."""
    base = (spec.model.path, spec.trainer.backend, spec.rollout.backend)
    up = [pool.setup for pool in ctx.pools.values() if pool.process.is_up]
    same = [setup for setup in up if (setup.model, setup.trainer, setup.engine) == base]
    is_warm = any((spec.algorithm.teacher or "") in ("", setup.teacher) for setup in same)
    box = config.load(ctx.home.config)
    devices = ctx.gpus.devices
    question = SpecQuestion(
        spec=msgspec.to_builtins(spec),
        cwd=cwd,
        device=devices[0].kind,
        devices=len(devices),
        available=None if devices[0].is_cpu else min(device.memory_total for device in devices),
        warm=is_warm,
        backends=msgspec.to_builtins(box.backends, enc_hook=str),
        reference=None if reference is None else str(reference),
        loggers=box.loggers,
        look=look,
        notify=box.notify,
        cluster=msgspec.to_builtins(box.cluster, enc_hook=str),
        written=written,
    )
    user = ctx.user(uid)
    argv, env = ctx.processes.commands.asked_as(user, ctx.processes.commands.preflight, ctx.home)
    env |= secrets_of(box, user)
    last = "starting"
    try:
        async with under_guard(argv, env) as process, asyncio.timeout(ctx.patience.preflight) as limit:

            def follow(words: str) -> None:
                nonlocal last
                last = words
                doing().tell(words)
                limit.reschedule(asyncio.get_running_loop().time() + ctx.patience.preflight)

            output, errors = await exchanged(process, msgspec.json.encode(question), follow)
    except TimeoutError:
        problem = f"the check of the spec got no further for {ctx.patience.preflight:.0f} s: it was {last}"
        raise SpecError(problem, hint=_slow(spec, last)) from None
    facts = answer(output, errors, process.returncode or 0)
    if ctx.home.config.exists():
        ctx.config = msgspec.structs.replace(ctx.config, backends=box.backends, cluster=box.cluster)
    return facts


async def exchanged(process: Process, question: bytes, follow: Callable[[str], None]) -> tuple[bytes, bytes]:
    """Send the question to a check, and return all that it prints, output and errors.

    follow: called with what the check says that it is doing.

    Raises SpecError when it prints more than any check does: user code runs in it.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(question)
    process.stdin.close()
    readers = [
        asyncio.create_task(_all_of(process.stdout, follow)),
        asyncio.create_task(_all_of(process.stderr)),
    ]
    try:
        output, errors = await asyncio.gather(*readers)
        await process.wait()
        return output, errors
    finally:
        for reader in readers:
            reader.cancel()


async def _all_of(stream: asyncio.StreamReader, follow: Callable[[str], None] | None = None) -> bytes:
    """Read a stream to its end, and `follow` what its lines say is being done. Raises SpecError."""
    data = bytearray()
    while chunk := await stream.read(1 << 16):
        data += chunk
        if follow is not None:
            lines = chunk[-_DOING_BYTES:].split(b"\n")
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                doing = msgspec.json.decode(lines[-2] if len(lines) > 1 else b"", type=PreflightLine).doing
                if words := " ".join(doing.split())[:_DOING_CHARACTERS]:
                    follow(words)
        if len(data) > _PRINTED_BYTES:
            size = f"{_PRINTED_BYTES >> 20} MiB"
            raise SpecError(f"the check of the spec printed over {size}", hint="Print less.")
    return bytes(data)


def _slow(spec: Spec, doing: str) -> str:
    """Guess what takes so long, by what the check last said that it was doing."""
    if doing.startswith(("reading the data", "looking at")) or " of " in doing:
        return "Is the disk slow, or one row of the data far longer than the others?"
    if not spec.model.path.startswith("builtin:") and not os.path.exists(os.path.expanduser(spec.model.path)):
        shows = f"`hf download {spec.model.path.partition('@')[0]}` shows how far it is"
        return f"Is the model being downloaded? {shows}, and keeps what is there."
    return "A reward module that works while it is imported, or a slow disk?"


def answer(output: bytes, errors: bytes, code: int = 0) -> SpecFacts:
    """Read the facts in the last line of a check's output.

    code: the exit code of its guard; the facts of a process that was killed do not count.

    Raises SpecError for any other output: the process runs user code, which may have taken its descriptors.
    """
    line = output.rstrip(b"\n").rpartition(b"\n")[2]
    if len(line) > CHECK_BYTES:
        size = f"{CHECK_BYTES >> 20} MiB"
        raise SpecError(f"the check of the spec fell over: its answer has over {size}", hint=_FORGED)
    try:
        result = msgspec.json.decode(line, type=PreflightLine)
    except msgspec.ValidationError as error:
        raise SpecError(f"the check of the spec fell over: its answer: {error}", hint=_FORGED) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        result = PreflightLine()
    if result.error is not None:
        raise from_wire(msgspec.to_builtins(result.error))
    if result.facts is None or code:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        if guard.killed_by(code) == signal.SIGKILL:
            problem = "the check of the spec was killed: the machine may have no memory left"
            raise SpecError(problem, hint="Free some memory, or name a smaller model or file of data.")
        if last.startswith(UNREADABLE):
            hint = "It holds the value alone, and is yours: chmod 600."
            raise SpecError(last.removeprefix("lorad: "), hint=hint)
        if cause := in_words_of(errors.decode(errors="replace")):
            raise SpecError(f"the check of the spec fell over: {cause.what}: {last}", hint=cause.advice)
        raise SpecError(f"the check of the spec fell over: {last}", hint="Does the reward module import?")
    return result.facts
