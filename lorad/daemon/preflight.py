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
from lorad.errors import SpecError, from_wire
from lorad.specs import Spec


async def preflight(ctx: Context, spec: Spec, cwd: str) -> dict[str, Any]:
    """The facts that it found. Raises what it raised, SpecError when it takes too long or falls over.

    It reads `config.yaml` as that is now; from then on the daemon goes by the same backends.
    """
    wanted = (spec.model.path, spec.trainer.backend, spec.rollout.backend)
    warm = any(
        p.process.is_up and (p.setup.model, p.setup.trainer, p.setup.engine) == wanted for p in ctx.pools.values()
    )
    where = {"device": ctx.devices[0].name, "devices": len(ctx.devices)}
    question = msgspec.json.encode({"spec": spec, "cwd": cwd, "warm": warm, **where})
    env = {**os.environ, **ctx.commands.environment(ctx.home)}
    argv = ctx.commands.preflight
    process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env)
    try:
        async with asyncio.timeout(ctx.patience.preflight):
            output, errors = await process.communicate(question)
    except TimeoutError:
        raise SpecError(f"the check of the spec took over {ctx.patience.preflight:.0f} s", hint=slow(spec)) from None
    finally:
        await end(process)
    facts = answer(output, errors)
    if ctx.home.config.exists():
        ctx.config = msgspec.structs.replace(ctx.config, backends=config.load(ctx.home.config).backends)
    return facts


def slow(spec: Spec) -> str:
    """What may take so long."""
    path = Path(spec.model.path).expanduser()
    if not spec.model.path.startswith("builtin:") and not path.exists():
        name = spec.model.path.partition("@")[0]
        return f"Is the model being downloaded? `hf download {name}` shows how far it is, and keeps what is there."
    return "A reward module that works while it is imported, or a slow disk?"


async def end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
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
