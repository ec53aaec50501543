"""Whose turn it is: deficit round robin over the parties that share one thing which does one piece of work at
a time.

Shreedhar & Varghese, "Efficient Fair Queuing using Deficit Round Robin" (1995); what a piece costs is known
only when it is done, so it is charged afterwards. In each round every party that waits is given credit in
proportion to its weight; whose credit is above zero may go, and pays for what it took. Who does not wait
saves nothing, and a debt that it left is forgiven as rounds go by. So nobody starves, and nobody is better
off by coming late.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

ROUND = 0.01  # seconds of credit per round and unit of weight
_LEAST = 1e-6  # seconds that a piece of work costs at least
FIRST_SHARE = 0.25  # of recent seconds (or rows of a batch): who goes first does so up to that
_RECENT = 1.0  # seconds of work after which what was done before counts half


class Account(ABC):
    """A holder of credit."""

    haste = 1.0
    """The factor by which its weight counts."""

    @property
    @abstractmethod
    def parties(self) -> "Collection[Party]":
        """Return the parties whose weight the account has, each once."""


class Party(Account):
    """A run, everybody who is served, or the pool itself.

    Attributes:
        waited: The seconds that all its calls waited.
        goes_first: Whether it goes first as long as it has had less than `FIRST_SHARE` of the recent seconds.
    """

    def __init__(self, name: str, weight: float = 1.0, *, goes_first: bool = False) -> None:
        self.name = name
        self.weight = weight
        self.goes_first = goes_first
        self.waited = 0.0

    @property
    def parties(self) -> "Collection[Party]":
        return (self,)


class Payer(NamedTuple):
    """Who is billed for a piece of work.

    Attributes:
        run: The run whose adapter it is; "" for the pool itself.
        attempt: The attempt of the run that asks; 0 for others who are served a version of it.
        alias: The name under which they asked.
    """

    run: str = ""
    attempt: int = 0
    alias: str = ""


NOBODY = Payer()


class Work(ABC):
    """A piece of work that waits for its turn: the line it is in, who pays, and who is billed."""

    @property
    @abstractmethod
    def account(self) -> Account:
        """Return the account in whose line the work waits."""

    @abstractmethod
    def parts(self) -> Iterable[tuple[Account, float]]:
        """Return who pays which part of the work's cost. A part below zero pays debts off."""

    @abstractmethod
    def payers(self) -> Mapping[Payer, float]:
        """Return who is billed for the work, each with a weight above zero. Never empty."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Report to its callers that they waited so long for their turn."""


class Caller(Work):
    """One call of a party.

    Attributes:
        waited: The seconds that this call waited.
        prompts: The tokens of its prompts.
        cached: The tokens among them that were not computed again.
    """

    def __init__(self, party: Party, payer: Payer = NOBODY) -> None:
        self.party = party
        self.payer = payer
        self.waited = 0.0
        self.prompts = self.cached = 0

    @property
    def account(self) -> Account:
        return self.party

    def parts(self) -> Iterable[tuple[Account, float]]:
        return ((self.party, 1.0),)

    def payers(self) -> Mapping[Payer, float]:
        return {self.payer: 1.0}

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.party.waited += seconds


@dataclass(eq=False)
class Together(Work):
    """Work for several callers at once, who pay by their sizes. It is done when it is the turn of the one
    with the greatest weight, so that nobody urgent waits for being with others.
    """

    callers: Sequence[Caller]
    sizes: Sequence[float]

    @property
    def account(self) -> Account:
        return max(self.callers, key=lambda caller: caller.party.weight).account

    def parts(self) -> Iterable[tuple[Account, float]]:
        total = sum(self.sizes)
        return [(caller.party, size / total) for caller, size in zip(self.callers, self.sizes, strict=True)]

    def payers(self) -> Mapping[Payer, float]:
        weights: dict[Payer, float] = {}
        for caller, size in zip(self.callers, self.sizes, strict=True):
            weights[caller.payer] = weights.get(caller.payer, 0.0) + size
        return weights

    def wait(self, seconds: float) -> None:
        for caller in self.callers:
            caller.wait(seconds)


POOL = Caller(Party("pool"))
WORK: ContextVar[Work] = ContextVar("work", default=POOL)
"""Whose work is asked for. Set around each call."""


def caller() -> Caller:
    """Return the running call, which collects its waiting time; the pool's own when there is none, or
    several.
    """
    work = WORK.get()
    return work if isinstance(work, Caller) else POOL


class _Turn(NamedTuple, Generic[T]):
    """A turn that is waited for; one that `is_ahead` goes first, and pays nothing."""

    work: Work
    what: T
    is_ahead: bool = False


class Turns(Generic[T]):
    """Lines of what waits, one for each account, and who is next. Not to be used by two threads at once."""

    def __init__(self) -> None:
        self._lines: dict[Account, deque[_Turn[T]]] = {}  # in the order of their turns
        self._credit: dict[Account, float] = {}
        self._recent = self._recent_first = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, work: Work, what: T) -> None:
        """Append work to the line of its account."""
        self._lines.setdefault(work.account, deque()).append(_Turn(work, what))

    def take(self) -> _Turn[T]:
        """Take the next turn off its line. There must be one; `charge` it when it is done."""
        first = None
        if self._recent_first <= FIRST_SHARE * self._recent:
            first = next((account for account in self._lines if _goes_first(account)), None)
        account = first
        while account is None:
            account = next((each for each in self._lines if self._credit.get(each, 0.0) > 0), None)
            if account is None:
                # credit for as many rounds as it takes until somebody has some
                lines = Counter(party for waiting in self._lines for party in waiting.parties)
                incomes = {
                    waiting: ROUND
                    * waiting.haste
                    * (sum(party.weight / lines[party] for party in waiting.parties) or 1.0)
                    for waiting in self._lines
                }
                rounds = min(
                    math.floor(-self._credit.get(waiting, 0.0) / income) + 1
                    for waiting, income in incomes.items()
                )
                for idle in [each for each in self._credit if each not in incomes]:
                    self._credit[idle] += rounds * ROUND * sum(party.weight for party in idle.parties)
                    self._leave(idle)
                for waiting, income in incomes.items():
                    self._credit[waiting] = self._credit.get(waiting, 0.0) + rounds * income
        line = self._lines.pop(account)
        turn = line.popleft()
        if line:
            self._lines[account] = line  # behind all others
        return turn if first is None else turn._replace(is_ahead=True)

    def charge(self, turn: _Turn[T], seconds: float) -> None:
        """Charge the cost of a turn to those who pay for its work."""
        seconds = max(seconds, _LEAST)
        account = turn.work.account
        faded = 0.5 ** (seconds / _RECENT)
        self._recent = self._recent * faded + seconds
        self._recent_first = self._recent_first * faded + (seconds if _goes_first(account) else 0.0)
        if not turn.is_ahead:
            for payer, part in turn.work.parts():
                credit = self._credit.get(payer, 0.0)
                self._credit[payer] = (
                    credit - part * seconds if part > 0 else max(credit, min(0, credit - part * seconds))
                )
        if account not in self._lines:
            self._leave(account)

    def _leave(self, account: Account) -> None:
        """Drop the credit left to an account that stopped waiting; a party keeps its debt."""
        if self._credit.get(account, 0.0) >= 0 or not isinstance(account, Party):
            self._credit.pop(account, None)


def _goes_first(account: Account) -> bool:
    return any(party.goes_first for party in account.parties)


class TurnLock:
    """Held by one at a time, in turns, each charged the time for which it was held.

    Belongs to one asyncio loop.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._holder: _Turn[asyncio.Future[None]] | None = None
        self._since = 0.0

    async def acquire(self) -> None:
        """Wait for the lock on behalf of the running call; one that is cancelled meanwhile gives its place
        up.
        """
        work = WORK.get()
        asked = self._clock()
        mine = asyncio.get_running_loop().create_future()
        self._turns.put(work, mine)
        if self._holder is None:
            self._pass_on()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # its turn had just come
                self.release()
            raise
        work.wait(self._clock() - asked)

    def release(self) -> None:
        """Release the lock to who is next. Raises RuntimeError when nobody holds it."""
        if self._holder is None:
            raise RuntimeError("nobody holds the lock")
        self._turns.charge(self._holder, self._clock() - self._since)
        self._pass_on()

    def _pass_on(self) -> None:
        self._holder = None
        while self._holder is None and len(self._turns):
            turn = self._turns.take()
            if not turn.what.cancelled():
                turn.what.set_result(None)
                self._holder = turn
                self._since = self._clock()
