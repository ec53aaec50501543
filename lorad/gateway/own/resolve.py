"""Finds the version that a name in a request means, and the pool that serves it."""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, NotFound
from lorad.gateway.errors import no_such_model
from lorad.gateway.table import GatewayTable
from lorad.protocol.served import Served

_DAEMON_SECONDS = 120.0  # for the daemon to start a pool and load a version
_DAEMON_CALLS = 8  # at once
_REMEMBERED = 256  # versions that are in no table


class Resolver:
    """Answers each request once: one version serves a request from its first token to its last."""

    def __init__(self, home: Home, table: Path) -> None:
        self.table = GatewayTable(table)
        self._client = Client(home, timeout=_DAEMON_SECONDS)
        self._threads = ThreadPoolExecutor(_DAEMON_CALLS, thread_name_prefix="daemon")
        self._asking: dict[tuple[str, str | None], asyncio.Task[Served]] = {}
        self._others: OrderedDict[str, Served] = OrderedDict()

    async def find(self, model: str) -> Served:
        """Find a version. Raises ApiError (no such model), and what the daemon raises when it is asked."""
        names = self.table.names()
        served = names.versions.get(names.aliases.get(model, model)) or self._others.get(model)
        return served if served and served.socket else await self.renew(model)

    async def find_another(self, model: str, served: Served) -> Served:
        """Find what a name means now, after the version that `find` returned was gone."""
        again = await self.find(model)
        return await self.renew(model) if again == served else again

    async def renew(self, model: str) -> Served:
        """Have the daemon start the pool and load the version. Raises as `find`."""
        # a request after a swap never waits for an answer from before it
        meant = self.table.names().aliases.get(model)
        asking = self._asking.get((model, meant))
        if asking is None:
            asking = self._asking[model, meant] = asyncio.create_task(self._ask(model))
            asking.add_done_callback(lambda _: self._asking.pop((model, meant)))
        served = await asyncio.shield(asking)
        if served.name == model:
            self._others[model] = served
            self._others.move_to_end(model)
            while len(self._others) > _REMEMBERED:
                self._others.popitem(last=False)
        return served

    async def _ask(self, model: str) -> Served:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._threads, self._client.serving, model)
        except NotFound:
            raise no_such_model(model) from None
        except DaemonUnreachable:
            names = self.table.names()
            if model not in names.aliases and model not in names.versions and "@" not in model:
                raise no_such_model(model) from None
            raise
        return Served(answer.run, answer.version, answer.sha256, answer.model_path, answer.socket)

    def close(self) -> None:
        self.table.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
