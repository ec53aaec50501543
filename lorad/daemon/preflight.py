"""Asks a process of its own whether a spec can run: model, data, reward. The daemon imports none of the user's code."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import msgspec

from lorad import config
from lorad.daemon.context import Context
from lorad.daemon.secrets import secrets_of
from lorad.errors import SpecError, from_wire
from lorad.specs import Spec

PRINTED_BYTES = 16 << 20  # by user code, too, while it is imported


async def preflight(ctx: Context, spec: Spec, cwd: str, uid: int) -> dict[str, Any]:
    """The facts that it found as the user of `uid`, the run's owner. Raises what it raised, SpecError when it takes too
    long or falls over.

    It reads `config.yaml` as that is now; from then on the daemon goes by the same backends.
    """
    wanted = (spec.model.path, spec.trainer.backend, spec.rollout.backend)
    warm = any(
        p.process.is_up and (p.setup.model, p.setup.trainer, p.setup.engine) == wanted for p in ctx.pools.values()
    )
    where = {"device": ctx.devices[0].kind, "devices": len(ctx.devices)}
    box = config.load(ctx.home.config)
    question = msgspec.json.encode(
        {"spec": spec, "cwd": cwd, "warm": warm, "backends": box.backends, **where}, enc_hook=str
    )
    user, argv = ctx.user(uid), [*ctx.commands.preflight]
    env = {**(os.environ if user is None else user.environment), **ctx.commands.environment(ctx.home)}
    env |= secrets_of(box)
    argv = argv if user is None else user.command(argv, Path("/"))
    process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env)
    try:
        async with asyncio.timeout(ctx.patience.preflight):
            output, errors = await exchanged(process, question)
    except TimeoutError:
        raise SpecError(f"the check of the spec took over {ctx.patience.preflight:.0f} s", hint=slow(spec)) from None
    finally:
        await end(process)
    facts = answer(output, errors)
    if ctx.home.config.exists():
        ctx.config = msgspec.structs.replace(ctx.config, backends=box.backends)
    return facts


async def exchanged(process: Process, question: bytes) -> tuple[bytes, bytes]:
    """What it prints once it was asked. Raises SpecError when that is more than any check prints: it is user code."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(question)
    process.stdin.close()
    readers = [asyncio.create_task(all_of(stream)) for stream in (process.stdout, process.stderr)]
    try:
        output, errors = await asyncio.gather(*readers)
        return output, errors
    finally:
        for reader in readers:
            reader.cancel()


async def all_of(stream: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while chunk := await stream.read(1 << 16):
        data += chunk
        if len(data) > PRINTED_BYTES:
            raise SpecError(f"the check of the spec printed over {PRINTED_BYTES >> 20} MiB", hint="Print less.")
    return bytes(data)


def slow(spec: Spec) -> str:
    """What may take so long."""
    path = Path(spec.model.path).expanduser()
    if not spec.model.path.startswith("builtin:") and not path.exists():
        name = spec.model.path.partition("@")[0]
        return f"Is the model being downloaded? `hf download {name}` shows how far it is, and keeps what is there."
    return "A reward module that works while it is imported, or a slow disk?"


async def end(process: Process) -> None:
    """Its pipes are closed as well: what it started may hold them, and nobody reads the rest."""
    if process.returncode is None:
        process.kill()
        process._transport.close()  # type: ignore[attr-defined]
        await process.wait()


def answer(output: bytes, errors: bytes) -> dict[str, Any]:
    """The facts in the last line of the output; what user code printed before it does not matter."""
    lines = output.splitlines()
    try:
        found = json.loads(lines[-1])
        facts: dict[str, Any] = found["facts"] if found["ok"] else {}
    except (IndexError, ValueError, KeyError, TypeError):
        last = (errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        raise SpecError(f"the check of the spec fell over: {last}", hint="Does the reward module import?") from None
    if not found["ok"]:
        raise from_wire(found["error"])
    return facts
