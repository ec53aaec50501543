"""A process beside the runs, such as a gateway: it is started, adopted, restarted when it dies or its
settings change, and ended when unused.

All state is read from its attempt directories, so that a new daemon knows what the one before did.
"""

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context
from lorad.daemon.process.processes import DAMAGED, ProcessState, attempts_under, read_object, read_status
from lorad.daemon.process.user_files import make_attempt, own_directory, passable, passable_for
from lorad.daemon.process.users import User
from lorad.errors import StorageError
from lorad.files import remove_tree

log = logging.getLogger("lorad.daemon")

_SHORT_LIFE = 60.0  # seconds; after lives that were shorter there is a pause, which doubles
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds
_TERM_SECONDS = 60.0  # after SIGTERM, for its requests to end: SIGKILL
KEPT = 5  # attempt directories


@dataclass(frozen=True)
class Kept:
    """A process, as it should run.

    role: which of the commands it is.
    title: its name in logs.
    root: the directory that holds its `attempts`.
    work: the directory that it writes into; one of the user's, where it is theirs.
    arguments: what follows the command.
    settings: it is restarted when these change.
    user: whose process it is; None for the daemon's own.
    """

    role: Literal["gateway", "loggers", "notify", "tinker"]
    title: str
    root: Path
    work: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, object]
    environment: Mapping[str, str | None]
    user: User | None = None

    @property
    def lives(self) -> list[AttemptDir]:
        return list(attempts_under(self.root))


def state_of(ctx: Context, kept: Kept) -> ProcessState:
    """Look at the newest process; it is absent when there never was one."""
    lives = kept.lives
    return ctx.processes.inspect(lives[-1]) if lives else ProcessState("absent")


def keep(ctx: Context, kept: Kept, *, wanted: bool) -> None:
    """Start it when it is wanted, and watch it from then on. One that is not wanted any more is not started
    again.

    Raises OSError, and StorageError when the status of its process cannot be read: that is done all the
    same."""
    lives, state = kept.lives, state_of(ctx, kept)
    newest = lives[-1] if lives else None
    if newest and state.is_up:
        _look_after(ctx, kept, newest)
    elif wanted and time.time() >= not_before(lives):
        number = int(newest.root.name) + (state.phase != "absent") if newest else 1
        _start(ctx, kept, AttemptDir(kept.root / "attempts" / f"{number:04d}"))
        for old in lives[:-KEPT]:
            remove_tree(old.root)
    if state.trouble:
        raise StorageError(state.trouble, hint=DAMAGED)


def make_root(kept: Kept) -> None:
    """Make the directory of a process, and the one that it writes into as its user's. Raises OSError."""
    if kept.user is None:
        kept.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    else:
        passable(kept.root.parent.parent, kept.root.parent)
        passable_for(kept.user.uid, kept.root)
        own_directory(kept.work, kept.user)


def not_before(lives: list[AttemptDir]) -> float:
    """Unix time of the next start: at once after a long life, later and later after short ones in a row. An
    end that is yet to come was written by a clock that was wrong, and keeps nobody waiting."""
    pause, ended = 0.0, 0.0
    for attempt in reversed(lives):
        status = read_status(attempt)
        if status is None or status["ended_at"] is None or status.get("started_at") is None:
            break
        ended = ended or status["ended_at"]
        if status["ended_at"] - status["started_at"] > _SHORT_LIFE:
            break
        pause = min(2 * pause or _FIRST_PAUSE, _LONGEST_PAUSE)
    return 0.0 if ended > time.time() else ended + pause


def _look_after(ctx: Context, kept: Kept, attempt: AttemptDir) -> None:
    """Watch a process; end it when its settings changed or the home was moved, so that the next can
    start.
    """
    if not ctx.loop.is_watched(attempt.root):
        ctx.loop.watch(attempt.root, ctx.processes.watch(attempt))
        began = read_object(attempt.command)
        present = str(ctx.home.root), kept.settings
        if began and (began.get("home"), began.get(kept.role)) != present:
            log.info("%s: config.yaml or the place of the home has changed, it is started again", kept.title)
            ctx.processes.signal(attempt, signal.SIGTERM)


def _start(ctx: Context, kept: Kept, attempt: AttemptDir) -> None:
    """Raises OSError."""
    if kept.user is not None:
        passable(kept.root.parent)
        passable_for(kept.user.uid, kept.root)
        own_directory(kept.work, kept.user)
    make_attempt(attempt, kept.user)
    argv = [*getattr(ctx.processes.commands, kept.role), *kept.arguments]
    env = {**ctx.processes.commands.environment(ctx.home), **kept.environment}
    about: dict[str, object] = {
        "role": kept.role,
        "attempt": int(attempt.root.name),
        kept.role: kept.settings,
    }
    about |= {"home": str(ctx.home.root)}
    ctx.processes.start(attempt, argv, env, ctx.home.root, about=about, user=kept.user)
    ctx.loop.watch(attempt.root, ctx.processes.watch(attempt))
    log.info("%s: starting, life %s", kept.title, attempt.root.name)


def stop(ctx: Context, kept: Kept) -> bool:
    """Ask it to end when its requests have; False when there is none."""
    lives = kept.lives
    return bool(lives) and ctx.processes.signal(lives[-1], signal.SIGTERM)


def put_away(ctx: Context, kept: Kept) -> None:
    """Ask it to end, and kill it when it is still up after a while. Repeat it until it is gone."""
    if not state_of(ctx, kept).is_up:
        return
    newest = kept.lives[-1]
    number, asked_at = ctx.processes.signalled.get(newest.root, (0, 0.0))
    if number != signal.SIGTERM:
        log.info("%s: nobody needs it any more", kept.title)
        ctx.processes.signalled[newest.root] = (signal.SIGTERM, time.monotonic())
        ctx.processes.signal(newest, signal.SIGTERM)
    elif time.monotonic() - asked_at > _TERM_SECONDS:
        ctx.processes.kill_group(newest)
