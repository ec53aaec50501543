"""Adapters in the memory of a server: vLLM forgets the name of an unloaded one, and keeps its weights."""

import contextlib

from lorad.engines.remote.http import Http, ServerRefused

_ROUTE = "/collective_rpc"
_ANSWER_SECONDS = 60.0  # the engine answers between two steps


class AdapterNumbers:
    """Maps adapters to the numbers that the server gives their weights: a load adds one number."""

    def __init__(self) -> None:
        self._held: dict[str, set[int]] = {}
        self._numbers: dict[tuple[str, str], int] = {}

    async def begin(self, http: Http) -> None:
        """Read the numbers of a server that has just started: they begin again then."""
        self._held[str(http.address)] = await self._numbers_of(http)

    async def loaded(self, http: Http, name: str) -> None:
        """Find the number of an adapter right after its load; a server has one load at a time."""
        address = str(http.address)
        before = self._held.get(address, set())
        now = await self._numbers_of(http)
        self._held[address] = now
        self._numbers.pop((address, name), None)
        if len(new := now - before) == 1:
            self._numbers[address, name] = new.pop()

    async def forget(self, http: Http, name: str) -> None:
        """Remove the adapter's weights from the server, where their number is known and it can."""
        number = self._numbers.pop((str(http.address), name), None)
        if number is not None:
            with contextlib.suppress(ServerRefused):
                await self._order(http, "remove_lora", number)

    async def _numbers_of(self, http: Http) -> set[int]:
        try:
            first, *_ = await self._order(http, "list_loras")
        except ServerRefused:
            return set()
        return set(first)

    @staticmethod
    async def _order(http: Http, method: str, *arguments: int) -> list[list[int]]:
        """Call a method in each process of the engine; returns their answers."""
        body = {"method": method, "args": list(arguments)}
        reply = await http.post(_ROUTE, body, timeout=_ANSWER_SECONDS, admin=True)
        return list(reply["results"])
