"""What calls share: a decode batch, as one account (see `lorad/models/turns.py`), and memory."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable

from lorad.engines.builtin.decode import DecodeBatch
from lorad.models.turns import Account, Party, Work


class SharedDecode(Account, Work):
    """The decode batch as one party in the turns: it has the summed weight of all that have a call in it.

    A party whose share of the rows exceeds its share of the weight owes the difference, which lowers what
    others owe.
    """

    # who trains joins it the sooner: a step with everybody's rows costs little more than one with a few
    haste = 0.03

    def __init__(self, batch: DecodeBatch) -> None:
        self.batch = batch

    @property
    def parties(self) -> Collection[Party]:
        return dict.fromkeys(call.caller.party for call in self.batch.calls)

    @property
    def account(self) -> Account:
        return self

    def parts(self) -> Iterable[tuple[Account, float]]:
        parties = self.parties
        parts: list[tuple[Account, float]] = [(self, 1.0)]
        if len(parties) > 1 and self.batch.groups:
            rows = Counter(group.call.caller.party for group in self.batch.groups)
            weight = sum(party.weight for party in parties)
            parts += [(party, rows[party] / rows.total() - party.weight / weight) for party in parties]
        return parts

    def wait(self, seconds: float) -> None:
        for call in self.batch.calls:
            call.caller.wait(seconds)

    def ran(self, seconds: float) -> None:
        """A quantum has ended: calls without a row have waited for it as well."""
        if self.batch.pending:
            with_rows = {group.call for group in self.batch.groups}
            for call in self.batch.calls:
                if call not in with_rows:
                    call.caller.wait(seconds)


class Budget:
    """So many bytes, first come first served; who wants more than all of them gets all.

    Belongs to one asyncio loop.
    """

    def __init__(self, most: int) -> None:
        self.most = self.left = most
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, wanted: int) -> AsyncIterator[None]:
        """Wait until so much is free, and give it back in the end."""
        wanted = min(wanted, self.most)
        async with self._turn:
            while wanted > self.left:
                self._freed.clear()
                await self._freed.wait()
            self.left -= wanted
        try:
            yield
        finally:
            self.left += wanted
            self._freed.set()
