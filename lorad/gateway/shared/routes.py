"""Finds the version that a name in a request means, and its owner, for the front of a shared home: in the
table, or else by asking the daemon, which starts nothing for that and answers at once.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from lorad.box.paths import Home
from lorad.client.box_shapes import ServingOwner
from lorad.client.requests import OwnerRequest
from lorad.errors import DaemonUnreachable, NotFound, from_wire
from lorad.gateway.errors import no_such_model
from lorad.gateway.table import Table, remember
from lorad.protocol.served import FILE

_ASK_SECONDS = 10.0
_ASK_AT_ONCE = 32
_REMEMBERED = 1024  # versions that are in no table
_FRESH_SECONDS = 60.0  # the daemon keeps the gateway of an owner up who was asked about within some minutes


class Routes:
    """All within one event loop; nothing here waits for what belongs to a user."""

    def __init__(self, home: Home) -> None:
        self.table = Table(home.gateway / FILE)
        self._socket = home.socket
        timeout = aiohttp.ClientTimeout(total=_ASK_SECONDS)
        connector = aiohttp.UnixConnector(str(home.socket), limit=_ASK_AT_ONCE, force_close=True)
        self._daemon = aiohttp.ClientSession(connector=connector, timeout=timeout)
        self._others: OrderedDict[str, tuple[ServingOwner, float]] = OrderedDict()

    async def find(self, model: str, asker: str, sees: Callable[[int | None], bool]) -> ServingOwner:
        """Find a model that the client may see. Another's is looked up as one that nobody has: by asking the
        daemon each time, so that neither the words nor the time of an answer tell them apart.

        asker: the client's name. sees: says whether they may see versions of a uid.

        Raises ApiError (no such model), and what the daemon raises.
        """
        names = self.table.names()
        served = names.versions.get(names.aliases.get(model, model))
        if served is not None and served.owner_uid is not None and sees(served.owner_uid):
            return ServingOwner(served.name, served.owner_uid)
        known, asked_at = self._others.get(model, (None, 0.0))
        if known is not None and not sees(known.owner_uid):
            known = None
        if known is not None and time.monotonic() - asked_at < _FRESH_SECONDS:
            return known
        try:
            found = await self.ask(model, asker)
        except DaemonUnreachable:
            if known is not None:
                return known
            if "@" not in model:
                raise no_such_model(model) from None
            raise
        if not sees(found.owner_uid):
            raise no_such_model(model)
        return found

    async def ask(self, model: str, asker: str = "") -> ServingOwner:
        """Ask the daemon, which from now on keeps the gateway of the owner up; asker: where they may see it.

        Raises ApiError and LoradError.
        """
        try:
            body = msgspec.json.encode(OwnerRequest(model, asker))
            async with self._daemon.post("http://lorad/v1/serving/owner", data=body) as answer:
                data = await answer.read()
        except (OSError, aiohttp.ClientError) as error:  # a timeout is an OSError
            raise DaemonUnreachable(f"no daemon answers on {self._socket}: {error}") from error
        try:
            found = _understood(answer.status, data)
        except NotFound:
            raise no_such_model(model) from None
        if found.version == model:
            remember(self._others, model, (found, time.monotonic()), _REMEMBERED)
        return found

    async def close(self) -> None:
        self.table.close()
        await self._daemon.close()


def _understood(status: int, data: bytes) -> ServingOwner:
    """Raises the error that the daemon sent."""
    try:
        if status < 400:
            return msgspec.json.decode(data, type=ServingOwner)
        answered: Any = msgspec.json.decode(data)["error"]
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise DaemonUnreachable(f"the daemon answered {status}: {data[:200]!r}") from error
    raise from_wire(answered)
