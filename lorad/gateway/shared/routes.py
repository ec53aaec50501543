"""Finds the version that a name in a request means, and its owner, for the front of a shared home.

It looks in the table, or else asks the daemon, which starts nothing for that and answers at once.
"""

from collections.abc import Callable
from functools import partial

from lorad.box.paths import Home
from lorad.errors import DaemonUnreachable, NotFound
from lorad.gateway.errors import no_such_model
from lorad.gateway.table import GatewayTable
from lorad.http.client import AnswerCache, DaemonClient
from lorad.protocol.served import FILE
from lorad.records.requests import OwnerRequest
from lorad.records.versions import ServingOwner


class GatewayRoutes:
    """Finds owners of versions within one event loop; nothing here waits for what belongs to a user."""

    def __init__(self, home: Home) -> None:
        self.table = GatewayTable(home.gateway / FILE)
        self._daemon = DaemonClient(home.socket)
        self._others: AnswerCache[ServingOwner] = AnswerCache()  # versions that are in no table

    async def find(self, model: str, asker: str, sees: Callable[[int | None], bool]) -> ServingOwner:
        """Find a model that the client may see.

        A model of somebody else is looked up like a model that does not exist, by asking the daemon each
        time: neither the words nor the time of an answer tell the two apart.

        Args:
            asker: The client's name.
            sees: Says whether the client may see versions of a uid.

        Raises ApiError (no such model), and what the daemon raises.
        """
        names = self.table.names()
        served = names.versions.get(names.aliases.get(model, model))
        if served is not None and served.owner_uid is not None and sees(served.owner_uid):
            return ServingOwner(served.name, served.owner_uid)
        ask = partial(self.ask, model, asker)
        try:
            owner = await self._others.get(model, ask, lambda before: sees(before.owner_uid))
        except DaemonUnreachable:
            if "@" not in model:
                raise no_such_model(model) from None
            raise
        if not sees(owner.owner_uid):
            raise no_such_model(model)
        return owner

    async def ask(self, model: str, asker: str = "") -> ServingOwner:
        """Ask the daemon for the owner of a model, whose gateway it keeps up from now on.

        Args:
            asker: The client's name, where the daemon is to check that they may see the model.

        Raises ApiError and LoradError.
        """
        try:
            owner = await self._daemon.ask("/v1/serving/owner", OwnerRequest(model, asker), ServingOwner)
        except NotFound:
            raise no_such_model(model) from None
        if owner.version == model:
            self._others.put(model, owner)
        return owner

    async def aclose(self) -> None:
        self.table.close()
        await self._daemon.aclose()
