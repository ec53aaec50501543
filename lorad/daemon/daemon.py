"""The daemon from start to end: lock, adopt, answer, reconcile."""

import asyncio
import contextlib
import logging
import logging.handlers
import os
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from lorad.box import config
from lorad.box.paths import Home, refuse_open
from lorad.box.proxies import past_proxies
from lorad.box.tokens import tokens_trouble
from lorad.daemon.adopt import adopt
from lorad.daemon.api.metrics_port import serve_metrics
from lorad.daemon.api.server import make_app
from lorad.daemon.context import Context
from lorad.daemon.gpu.devices import environment, find_devices
from lorad.daemon.gpu.state import GpuState
from lorad.daemon.home_lock import GOODBYE_SECONDS, lock, writable
from lorad.daemon.open_store import open_journal, open_store
from lorad.daemon.process.enter import PLACE
from lorad.daemon.process.shared_home import prepare_shared
from lorad.daemon.process.sharing import SharedBox, Users
from lorad.daemon.reconcile import reconcile
from lorad.errors import SpecError
from lorad.http.serve import SocketFile, serve
from lorad.protocol.structs import learn_structs

log = logging.getLogger("lorad.daemon")

_LOG_BYTES = 8 << 20
_LOG_FILES = 3
_THREADS = 64  # most of which wait for a pool


def run_daemon(home: Home, *, system: bool = False) -> None:
    """Serve `home`, for all users where it is of the `system`, until SIGTERM, SIGINT or `shutdown`.

    Raises Conflict when the home has a daemon, SpecError, NotAllowed.
    """
    learn_structs()
    if system:
        prepare_shared(home)
    else:
        prepare(home)
    with lock(home):
        trouble = ""
        try:  # a file that is kept small, or stderr where that cannot be written
            handler: logging.Handler = logging.handlers.RotatingFileHandler(
                home.daemon_log, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES
            )
        except OSError as error:
            handler = logging.StreamHandler()
            trouble = f"the daemon has no log: {home.daemon_log}: {error.strerror}"
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(handler)
        for name in ("lorad.daemon", "lorad.http"):
            logging.getLogger(name).setLevel(logging.INFO)
        settings = config.load(home.config)
        if system and settings.secrets:  # every user could read them in processes of theirs
            raise SpecError(
                f"{home.config}: secrets: all users of a shared daemon would get them",
                hint="Remove them. Each user has a file for each variable, mode 0600: "
                f"~/{PLACE}/{min(settings.secrets)}",
            )
        store = open_store(home)
        devices = find_devices(settings.devices.cpu_slots)
        os.environ.update(environment(devices) | past_proxies(os.environ))  # for all that it starts
        ctx = Context(home, settings, store, open_journal(home), GpuState(devices))
        ctx.journal.tell_start(store.schema)
        if tokens_wrong := tokens_trouble(settings.gateway):
            log.error("%s", tokens_wrong)
        ctx.users = SharedBox() if system else Users()
        ctx.storage.log_trouble = trouble
        try:
            asyncio.run(_serve(ctx))
        finally:
            ctx.store.close()
            ctx.journal.close()
            log.info("the daemon ends; runs and pools continue")


def prepare(home: Home) -> None:
    """Make the directories that are missing. Raises StorageError, NotAllowed."""
    with writable():
        for directory in (home.root, home.runs, home.pools, home.daemon_log.parent):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        refuse_open(home.root)


async def _serve(ctx: Context) -> None:
    """Answer from the first moment, but adopt before anything is started."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ctx.close)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    with writable():
        adopt(ctx)
    async with serve_api(ctx):
        log.info("the daemon is up: pid %d, home %s", os.getpid(), ctx.home.root)
        await reconcile(ctx)
        async with ctx.requests.parting:  # until the request that ends the daemon has its answer
            pass


@contextlib.asynccontextmanager
async def serve_api(ctx: Context) -> AsyncIterator[None]:
    """Serve the API on the home's socket."""
    where = SocketFile(ctx.home.socket, ctx.users.socket_mode, "`lorad daemon stop` ends it.")
    served = serve(make_app(ctx), [where], ctx.requests.bounds, name="the daemon", goodbye=GOODBYE_SECONDS)
    try:
        async with served, serve_metrics(ctx):
            yield
    finally:
        await end_tasks(ctx)


async def end_tasks(ctx: Context) -> None:
    """End what the daemon itself has under way."""
    for connection in list(ctx.requests.waiting):
        connection.abort()
    for task in list(ctx.loop.tasks):
        task.cancel()
    await asyncio.gather(*ctx.loop.tasks, return_exceptions=True)
    ctx.readers.close()
    ctx.loop.close()
