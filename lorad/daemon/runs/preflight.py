"""Ask a process of its own whether a spec can run: model, data, reward.

The daemon imports none of the user's code.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lorad.bounds import CHECK_BYTES
from lorad.box import config
from lorad.children import guard
from lorad.client.requests import RunRequest, TrialRequest
from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.causes import in_words_of
from lorad.daemon.process.commands import secrets_of
from lorad.daemon.process.doing import doing
from lorad.daemon.process.enter import SAID
from lorad.errors import PoolLost, SpecError, from_wire
from lorad.protocol.preflight import Answer, Question, SpecFacts
from lorad.spec.model import Spec
from lorad.spec.text import places

_Result = TypeVar("_Result")
_LINE_BYTES = 1 << 16
_TOLD_BYTES, _WORDS = 1 << 12, 100  # of a line that says what a check is doing, and characters of that
_PRINTED_BYTES = 16 << 20  # user code may print, too, while it is imported
_FORGED = "Does the reward module write where only lorad answers?"
_END_SECONDS = guard.LINGER_SECONDS + guard.KILL_SECONDS + 1.0  # for the guard to end what it started


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
    """The facts that it found as the user of `uid`, the run's owner. Raises what it raised, SpecError when it
    takes too long or falls over, and Conflict when too many of that user's wait.

    It reads `config.yaml` as that is now; from then on the daemon goes by the same backends
    and cluster. reference: where
    the adapter lies that KL is measured against. body: has the spec as the user wrote it; without it nothing
    of `lora` is open. look: whether the data are to be described, too.
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
    wanted = (spec.model.path, spec.trainer.backend, spec.rollout.backend, spec.algorithm.teacher or "")
    warm = any(
        p.process.is_up
        and (p.setup.model, p.setup.trainer, p.setup.engine) == wanted[:3]
        and wanted[3] in ("", p.setup.teacher)
        for p in ctx.pools.values()
    )
    box = config.load(ctx.home.config)
    question = Question(
        spec=msgspec.to_builtins(spec),
        cwd=cwd,
        device=ctx.gpus.devices[0].kind,
        devices=len(ctx.gpus.devices),
        warm=warm,
        backends=msgspec.to_builtins(box.backends, enc_hook=str),
        reference=None if reference is None else str(reference),
        loggers=box.loggers,
        look=look,
        notify=box.notify,
        cluster=msgspec.to_builtins(box.cluster, enc_hook=str),
        written=written,
    )
    user, argv = ctx.user(uid), [*ctx.processes.commands.preflight]
    env = {
        **(os.environ if user is None else user.environment),
        **ctx.processes.commands.environment(ctx.home),
    }
    env |= secrets_of(box, user)
    argv = argv if user is None else user.command(argv, Path("/"))
    last = "starting"
    try:
        async with guarded(argv, env) as process, asyncio.timeout(ctx.patience.preflight) as limit:

            def heard(words: str) -> None:
                nonlocal last
                last = words
                doing().tell(words)
                limit.reschedule(asyncio.get_running_loop().time() + ctx.patience.preflight)

            output, errors = await exchanged(process, msgspec.json.encode(question), heard)
    except TimeoutError:
        raise SpecError(
            f"the check of the spec got no further for {ctx.patience.preflight:.0f} s: it was {last}",
            hint=_slow(spec, last),
        ) from None
    facts = answer(output, errors, process.returncode or 0)
    if ctx.home.config.exists():
        ctx.config = msgspec.structs.replace(ctx.config, backends=box.backends, cluster=box.cluster)
    return facts


@contextlib.asynccontextmanager
async def guarded(
    argv: Sequence[str], env: Mapping[str, str], *, limit: int = _LINE_BYTES
) -> AsyncIterator[Process]:
    """A process that ends, with whatever user code started from it, when this is left or the daemon is gone.

    limit: bytes of a line that can be read of it.
    Its guard is the daemon's own, also where `argv` becomes another user: nobody but the daemon can end it.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), "--", *argv]
            starting = asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=env,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                limit=limit,
            )
            # asyncio kills a process whose start is cancelled; this one is a guard, which then would end
            # nothing
            process, cancelled = await _uncancelled(starting)
        try:
            if cancelled:
                raise asyncio.CancelledError
            yield process
        finally:
            await _end(process)


async def lines_of(process: Process, what: str, question: bytes = b"") -> AsyncGenerator[bytes, None]:
    """Send a question and yield the lines that a process of a user's prints, up to one that ends it for the
    caller. what: says which process it is.

    Raises PoolLost when there is no further line, or one that is too long.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(question)
    process.stdin.close()
    errors = asyncio.create_task(_last_of(process.stderr))
    try:
        while line := await process.stdout.readline():
            yield line
        last = (await errors).decode(errors="replace").strip().splitlines()[-1:]
        raise PoolLost(f"{what} fell over: {' '.join(last)}", hint="Try again.")
    except ValueError:
        raise PoolLost(f"{what} printed a line without end", hint="Try again.") from None
    finally:
        errors.cancel()


async def _last_of(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, and keep the last of it."""
    last = b""
    while chunk := await stream.read(_LINE_BYTES):
        last = (last + chunk)[-_LINE_BYTES:]
    return last


async def exchanged(process: Process, question: bytes, heard: Callable[[str], None]) -> tuple[bytes, bytes]:
    """Send the question to a check and read what it prints. heard: gets what it says that it is doing.

    Raises SpecError when that is more than any check prints: user code runs in it.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(question)
    process.stdin.close()
    readers = [
        asyncio.create_task(_all_of(process.stdout, heard)),
        asyncio.create_task(_all_of(process.stderr)),
    ]
    try:
        output, errors = await asyncio.gather(*readers)
        await process.wait()
        return output, errors
    finally:
        for reader in readers:
            reader.cancel()


async def _all_of(stream: asyncio.StreamReader, heard: Callable[[str], None] | None = None) -> bytes:
    data = bytearray()
    while chunk := await stream.read(1 << 16):
        data += chunk
        if heard is not None and (words := _told(chunk)):
            heard(words)
        if len(data) > _PRINTED_BYTES:
            raise SpecError(
                f"the check of the spec printed over {_PRINTED_BYTES >> 20} MiB", hint="Print less."
            )
    return bytes(data)


def _told(printed: bytes) -> str:
    """Return what a check says in the last whole line of what it printed; "" where that is no such line."""
    lines = printed[-_TOLD_BYTES:].split(b"\n")
    try:
        last = msgspec.json.decode(lines[-2] if len(lines) > 1 else b"", type=Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return " ".join(last.doing.split())[:_WORDS]


def _slow(spec: Spec, doing: str) -> str:
    """Guess what may take so long. doing: what a check last said of itself."""
    if doing.startswith(("reading the data", "looking at")) or " of " in doing:
        return "Is the disk slow, or one row of the data far longer than the others?"
    if not spec.model.path.startswith("builtin:") and not os.path.exists(os.path.expanduser(spec.model.path)):
        name = spec.model.path.partition("@")[0]
        return (
            f"Is the model being downloaded? `hf download {name}` shows how far it is, and keeps what is "
            "there."
        )
    return "A reward module that works while it is imported, or a slow disk?"


async def _end(process: Process) -> None:
    """Ask a guard to kill what it started, and wait until it has.

    A daemon that ends waits too: a guard that is itself killed would leave its processes running.
    """
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(guard.KILL_NOW)
    _, cancelled = await _uncancelled(_ended(process))
    if cancelled:
        raise asyncio.CancelledError


async def _uncancelled(work: Coroutine[Any, Any, _Result]) -> tuple[_Result, bool]:
    """Finish `work` even if this task is cancelled meanwhile.

    Returns its result and whether that happened.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


async def _ended(process: Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await asyncio.gather(_passed_over(process.stdout), _passed_over(process.stderr), process.wait())
    process._transport.close()  # type: ignore[attr-defined]


async def _passed_over(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(1 << 16):
        pass


def answer(output: bytes, errors: bytes, code: int = 0) -> SpecFacts:
    """The facts in the last line of the output.

    code: the exit code of its guard; facts of a process that was killed are nobody's. Raises SpecError for
    anything else: the process runs user code, which may have taken its descriptors.
    """
    line = output.rstrip(b"\n").rpartition(b"\n")[2]
    if len(line) > CHECK_BYTES:
        size = f"{CHECK_BYTES >> 20} MiB"
        raise SpecError(f"the check of the spec fell over: its answer has over {size}", hint=_FORGED)
    try:
        found = msgspec.json.decode(line, type=Answer)
    except msgspec.ValidationError as error:
        raise SpecError(f"the check of the spec fell over: its answer: {error}", hint=_FORGED) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = Answer()
    if found.error is not None:
        raise from_wire(msgspec.to_builtins(found.error))
    if found.facts is None or code:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        if code == 128 + signal.SIGKILL:
            hint = "Free some memory, or name a smaller model or file of data."
            raise SpecError(
                "the check of the spec was killed: the machine may have no memory left", hint=hint
            )
        if last.startswith(SAID):
            raise SpecError(
                last.removeprefix("lorad: "), hint="It holds the value alone, and is yours: chmod 600."
            )
        if cause := in_words_of(errors.decode(errors="replace")):
            raise SpecError(f"the check of the spec fell over: {cause.what}: {last}", hint=cause.advice)
        raise SpecError(f"the check of the spec fell over: {last}", hint="Does the reward module import?")
    return found.facts
