"""The gateway's process: up from the first alias, pin or served base on, adopted, and started again when it dies.

Everything is read off its attempt directories, so that a new daemon knows what the one before did.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import time

import msgspec

from lorad.daemon.context import Context
from lorad.daemon.processes import ProcessState, attempts_under, read_status
from lorad.paths import AttemptDir
from lorad.protocol.listener import FOR_ALL, answers

log = logging.getLogger("lorad.daemon")

SHORT_LIFE = 60.0  # seconds; after lives that were shorter there is a pause, which doubles
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds
UP_SECONDS = 15.0  # for its first answer
KEPT = 5  # attempt directories
WANTED = """
SELECT 1 FROM aliases UNION ALL SELECT 1 FROM versions WHERE pinned = 1 UNION ALL SELECT 1 FROM runs WHERE serving = 1
LIMIT 1
"""


def keep_gateway(ctx: Context) -> None:
    """Start it when there is something to serve, and watch it from then on."""
    lives = list(attempts_under(ctx.home.gateway))
    newest = lives[-1] if lives else None
    state = ctx.processes.inspect(newest) if newest else ProcessState("absent")
    if newest and state.is_up:
        look_after(ctx, newest)
    elif is_wanted(ctx) and time.time() >= not_before(lives):
        number = int(newest.root.name) + (state.phase != "absent") if newest else 1
        start_gateway(ctx, AttemptDir(ctx.home.gateway / "attempts" / f"{number:04d}"))
        for old in lives[:-KEPT]:
            shutil.rmtree(old.root, ignore_errors=True)


def is_wanted(ctx: Context) -> bool:
    return ctx.store.row(WANTED) is not None


def not_before(lives: list[AttemptDir]) -> float:
    """Unix time of the next start: at once after a long life, later and later after short ones in a row."""
    pause, ended = 0.0, 0.0
    for attempt in reversed(lives):
        status = read_status(attempt)
        if status is None or status["ended_at"] is None or status.get("started_at") is None:
            break
        ended = ended or status["ended_at"]
        if status["ended_at"] - status["started_at"] > SHORT_LIFE:
            break
        pause = min(2 * pause or FIRST_PAUSE, LONGEST_PAUSE)
    return ended + pause


def look_after(ctx: Context, attempt: AttemptDir) -> None:
    """One with other settings than config.yaml has now makes room for the next."""
    if not ctx.waker.is_watched(attempt.root):
        ctx.waker.watch(attempt.root, ctx.processes.watch(attempt))
        if told_settings(attempt) not in (None, settings_of(ctx)):
            log.info("gateway: config.yaml has changed, it is started again")
            ctx.processes.signal(attempt, signal.SIGTERM)


def settings_of(ctx: Context) -> object:
    settings: dict[str, object] = msgspec.to_builtins(ctx.config.gateway, enc_hook=str)
    return settings | ({"for_all": is_for_all(ctx)} if ctx.system else {})


def is_for_all(ctx: Context) -> bool:
    """Whoever may see a version may ask it, and where only owners do, they need a token."""
    return ctx.system and ctx.config.sharing.read == "all"


def told_settings(attempt: AttemptDir) -> object:
    try:
        return json.loads(attempt.command.read_bytes()).get("gateway")
    except (OSError, ValueError):
        return None


def start_gateway(ctx: Context, attempt: AttemptDir) -> None:
    argv = [*ctx.commands.gateway, str(ctx.home.root)]
    about = {"role": "gateway", "attempt": int(attempt.root.name), "gateway": settings_of(ctx)}
    env = {**ctx.commands.environment(ctx.home), FOR_ALL: "1" if is_for_all(ctx) else None}
    ctx.processes.start(attempt, argv, env, ctx.home.root, about=about)
    ctx.waker.watch(attempt.root, ctx.processes.watch(attempt))
    log.info("gateway: starting, life %s", attempt.root.name)


def stop_gateway(ctx: Context) -> bool:
    """Ask it to end when its requests have; False when there is none."""
    lives = list(attempts_under(ctx.home.gateway))
    return bool(lives) and ctx.processes.signal(lives[-1], signal.SIGTERM)


def gateway_socket(ctx: Context) -> str | None:
    """Where the gateway answers now."""
    lives = list(attempts_under(ctx.home.gateway))
    is_up = bool(lives) and ctx.processes.inspect(lives[-1]).phase == "alive" and answers(ctx.home.gateway_socket)
    return str(ctx.home.gateway_socket) if is_up else None


async def gateway_up(ctx: Context) -> None:
    """Until it answers, or for as long as that should take."""
    deadline = time.monotonic() + UP_SECONDS
    ctx.waker.poke()
    while gateway_socket(ctx) is None and time.monotonic() < deadline:  # noqa: ASYNC110 (sockets are polled)
        await asyncio.sleep(0.05)
