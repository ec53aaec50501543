"""The machine that every service runs on: a process beside the runs is started, adopted, started again when
it dies or its settings change, and put away when nobody needs it.

A service has a process of the daemon's own, one of each user of a shared daemon who needs it, or both. Their
state is read from their attempt directories, so that a new daemon knows what the one before did.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from lorad.box.paths import AttemptDir
from lorad.daemon.context import Context
from lorad.daemon.process.processes import DAMAGED, ProcessState, attempts_under, read_object, read_status
from lorad.daemon.process.user_files import make_attempt, own_directory, passable, passable_for
from lorad.daemon.process.users import User
from lorad.daemon.troubles import Item
from lorad.errors import StorageError
from lorad.files import remove_tree
from lorad.protocol.tables import TABLE, write

log = logging.getLogger("lorad.daemon")

OWN = -1  # in place of a uid: the daemon's own process
_SHORT_LIFE = 60.0  # seconds; after lives that were shorter there is a pause, which doubles
_FIRST_PAUSE = 0.5  # seconds
_LONGEST_PAUSE = 60.0  # seconds
_START_SECONDS = 15.0  # until a process that is to stop has begun
_TERM_SECONDS = 60.0  # after SIGTERM, for its requests to end: SIGKILL
KEPT = 5  # attempt directories

Upkeep = Literal["up", "stays", "away"]
"""What is done about a process: it is kept up; it may stay if it is up, and is not started; it is ended."""


class Launch(NamedTuple):
    """How a process is started.

    arguments: what follows the command.
    settings: it is restarted when these change.
    environment: variables beside those of every process; None removes one.
    """

    arguments: tuple[str, ...]
    settings: Mapping[str, object] = {}
    environment: Mapping[str, str | None] = {}


class Failure(NamedTuple):
    """Something that a service cannot do now: a trouble of the daemon for as long as it lasts."""

    item: Item
    says: str
    hint: str


@dataclass(frozen=True)
class Service:
    """A row of the table of services.

    name: the name of its directory in the home; its program is `lorad.NAME`.
    title: what logs and troubles call it.
    look: looks at what there is to do, and decides what is done about the process of each user (OWN: the
        daemon's own). Nothing is done about a process that it does not name.
    launch: describes how a process is started.
    table: makes the `table.json` of what a process is to do; None for a service without one.
    take: acts upon the `state.json` of a process, and returns what fails; None where there is none.
    retried: the hint for a table that cannot be written.
    """

    name: str
    title: str
    look: Callable[[Context], Mapping[int, Upkeep]]
    launch: Callable[[Context, "ServiceProcess"], Launch]
    table: Callable[[Context, "ServiceProcess"], Struct] | None = None
    take: Callable[[Context, "ServiceProcess"], Iterable[Failure]] | None = None
    retried: str = "It is tried again."


@dataclass(frozen=True)
class ServiceProcess:
    """The process of a service that works for one user, or the daemon's own.

    root: the directory that holds its attempts and its table.
    user: whose process it is; None for the daemon's own.
    """

    service: Service
    uid: int
    root: Path
    user: User | None

    @property
    def work(self) -> Path:
        """Return the directory that it writes into, which is the user's where it works for one."""
        return self.root if self.user is None else self.root / "work"

    @property
    def title(self) -> str:
        return self.service.title if self.user is None else f"{self.service.title} of {self.user.name}"

    @property
    def lives(self) -> list[AttemptDir]:
        return list(attempts_under(self.root))


def process_of(ctx: Context, service: Service, uid: int = OWN) -> ServiceProcess:
    root = ctx.home.root / service.name
    if uid == OWN:
        return ServiceProcess(service, OWN, root, None)
    return ServiceProcess(service, uid, root / "owners" / str(uid), ctx.user(uid))


def on_table(ctx: Context, process: ServiceProcess) -> Launch:
    """Launch a process with the directories of its `table.json` and of the `state.json` that it writes."""
    return Launch((str(process.root), str(process.work)))


def state_of(ctx: Context, process: ServiceProcess) -> ProcessState:
    """Return the state of the newest life of a process; `absent` where there never was one."""
    lives = process.lives
    return ctx.processes.inspect(lives[-1]) if lives else ProcessState("absent")


# -- who needs a process -------------------------------------------------------------------------------------
def need(ctx: Context, service: Service, users: Iterable[int]) -> None:
    """Remember that users need a process of a service now."""
    for uid in users:
        ctx.services.needed_at[service.name, uid if ctx.users.shared else OWN] = time.monotonic()


def while_needed(
    ctx: Context, service: Service, users: Iterable[int], *, seconds: float
) -> dict[int, Upkeep]:
    """Keep the processes of users up, and other processes for `seconds` after they were last needed. In a
    daemon of one user its own process works for all.

    A new daemon does not know when a process was needed, and takes it that one that is up is needed now.
    """
    needed_at = ctx.services.needed_at
    now = time.monotonic()
    at_once = {uid if ctx.users.shared else OWN for uid in users}
    for uid in with_directory(ctx, service):
        if (service.name, uid) not in needed_at:
            is_up = state_of(ctx, process_of(ctx, service, uid)).is_up
            needed_at[service.name, uid] = now if is_up else float("-inf")
    lately = {uid: now - at < seconds for (name, uid), at in needed_at.items() if name == service.name}
    uids = sorted(at_once | lately.keys())
    return {uid: "up" if uid in at_once or lately[uid] else "away" for uid in uids}


def with_directory(ctx: Context, service: Service) -> set[int]:
    """Find the users for whom a process of a service has a directory, from before; OWN in a daemon of one."""
    root = ctx.home.root / service.name
    if not ctx.users.shared:
        return {OWN} if root.is_dir() else set()
    owners = root / "owners"
    return {int(path.name) for path in owners.iterdir() if path.name.isdigit()} if owners.is_dir() else set()


# -- the life of a process -----------------------------------------------------------------------------------
def keep(ctx: Context, process: ServiceProcess, *, start: bool) -> None:
    """Watch a process that is up, such as an earlier daemon's, and end it where its settings changed or the
    home was moved, so that the next can start.

    start: whether one that is not up is started.

    Raises OSError, and StorageError, after all of that, when the status of the process cannot be read.
    """
    name = process.service.name
    lives = process.lives
    state = state_of(ctx, process)
    newest = lives[-1] if lives else None
    if newest and state.is_up:
        if ctx.loop.watch(newest.root, partial(ctx.processes.watch, newest)):
            began = read_object(newest.command)
            present = str(ctx.home.root), process.service.launch(ctx, process).settings
            if began and (began.get("home"), began.get(name)) != present:
                why = "config.yaml or the home's place has changed, it is started again"
                log.info("%s: %s", process.title, why)
                ctx.processes.signal(newest, signal.SIGTERM)
    elif start and time.time() >= not_before(lives):
        number = int(newest.root.name) + (state.phase != "absent") if newest else 1
        attempt = AttemptDir(process.root / "attempts" / f"{number:04d}")
        make_root(ctx, process)
        make_attempt(attempt, process.user)
        launch = process.service.launch(ctx, process)
        argv = [*ctx.processes.commands.service(name), *launch.arguments]
        env = {**ctx.processes.commands.environment(ctx.home), **launch.environment}
        home = str(ctx.home.root)
        about = {"role": name, "attempt": number, name: launch.settings, "home": home}
        ctx.processes.start(attempt, argv, env, ctx.home.root, about=about, user=process.user)
        ctx.loop.watch(attempt.root, partial(ctx.processes.watch, attempt))
        log.info("%s: starting, life %s", process.title, attempt.root.name)
        for old in lives[:-KEPT]:
            remove_tree(old.root)
    if state.trouble:
        raise StorageError(state.trouble, hint=DAMAGED)


def not_before(lives: list[AttemptDir]) -> float:
    """Return the Unix time of the next start: at once after a long life, later and later after short lives in
    a row, at once again where a wrong clock wrote an end that is yet to come.
    """
    pause = ended = 0.0
    for attempt in reversed(lives):
        status = read_status(attempt)
        if status is None or status["ended_at"] is None or status.get("started_at") is None:
            break
        ended = ended or status["ended_at"]
        if status["ended_at"] - status["started_at"] > _SHORT_LIFE:
            break
        pause = min(2 * pause or _FIRST_PAUSE, _LONGEST_PAUSE)
    return 0.0 if ended > time.time() else ended + pause


def give_table(ctx: Context, process: ServiceProcess, table: Struct) -> None:
    """Write down what a process is to do, unless it is written. Raises StorageError."""
    key = process.service.name, process.uid
    path = process.root / TABLE
    if ctx.services.tables.get(key) == table and path.is_file():
        return
    try:
        make_root(ctx, process)
        write(path, table, uid=process.user.uid if process.user else None)
    except OSError as error:
        where = error.filename2 or error.filename or process.root  # for a rename, its target
        raise StorageError(f"{where}: {error.strerror}", hint=process.service.retried) from error
    ctx.services.tables[key] = table


def make_root(ctx: Context, process: ServiceProcess) -> None:
    """Make the directory of a process, and the one that it writes into. Raises OSError."""
    root = process.root
    if process.user is not None:
        passable(root.parent.parent, root.parent)
        passable_for(process.user.uid, root)
        own_directory(process.work, process.user)
    elif ctx.users.shared:
        passable(root)
    else:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)


# -- its end -------------------------------------------------------------------------------------------------
def put_away(ctx: Context, process: ServiceProcess) -> None:
    """Ask a process to end, and kill it when it is still up after a while. Called until it is gone."""
    if not state_of(ctx, process).is_up:
        return
    newest = process.lives[-1]
    number, asked_at = ctx.processes.signalled.get(newest.root, (0, 0.0))
    if number != signal.SIGTERM:
        log.info("%s: nobody needs it any more", process.title)
        ctx.processes.signalled[newest.root] = (signal.SIGTERM, time.monotonic())
        ctx.processes.signal(newest, signal.SIGTERM)
    elif time.monotonic() - asked_at > _TERM_SECONDS:
        ctx.processes.kill_group(newest)


def newest_lives(ctx: Context, service: Service) -> dict[int, AttemptDir]:
    """Find the newest life of each process of a service, by its user."""
    uids = sorted({OWN} | with_directory(ctx, service))
    lives = {uid: process_of(ctx, service, uid).lives[-1:] for uid in uids}
    return {uid: newest for uid, life in lives.items() for newest in life}


async def stop(ctx: Context, service: Service) -> bool:
    """Ask all processes of a service to end after their requests; False when the daemon has none of its own.

    One that is starting cannot be asked yet, and is waited for.
    """
    deadline = time.monotonic() + _START_SECONDS
    lives = newest_lives(ctx, service)
    while any(ctx.processes.inspect(attempt).phase == "starting" for attempt in lives.values()):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.02)
    signalled = {uid for uid, attempt in lives.items() if ctx.processes.signal(attempt, signal.SIGTERM)}
    return OWN in signalled
