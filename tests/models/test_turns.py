"""Turns: shares by weight, no starvation, no savings from idling, and counted waiting. Costs are made up."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from functools import partial

import pytest

from lorad.models.compute import Compute
from lorad.models.turns import (
    FIRST_SHARE,
    NOBODY,
    POOL,
    ROUND,
    WORK,
    Account,
    Caller,
    Party,
    Payer,
    Together,
    TurnLock,
    Turns,
    Work,
)
from lorad.pool.tenants import Parties, weight_of
from lorad.protocol.calls import Call


def taken(turns: Turns[Work], costs: dict[str, float], count: int) -> Counter[str]:
    """So many turns, each followed by more of the same work. costs: of one piece, by the party's name."""
    seen: Counter[str] = Counter()
    for _ in range(count):
        turn = turns.take()
        name = next(iter(turn.work.account.parties)).name
        seen[name] += 1
        turns.put(turn.what, turn.what)
        turns.charge(turn, costs[name])
    return seen


def waiting(*parties: Party) -> Turns[Work]:
    turns: Turns[Work] = Turns()
    for party in parties:
        work = Caller(party)
        turns.put(work, work)
    return turns


def test_turns_are_in_proportion_to_weights() -> None:
    seen = taken(waiting(Party("a", weight_of(0)), Party("b", weight_of(2))), {"a": 0.004, "b": 0.004}, 1000)
    assert 3.9 < seen["b"] / seen["a"] < 4.1


def test_less_haste_means_fewer_turns() -> None:
    patient = Party("patient", 4.0)
    patient.haste = 0.1
    seen = taken(waiting(patient, Party("other")), dict.fromkeys(["patient", "other"], 0.004), 1000)
    assert 0.38 < seen["patient"] / seen["other"] < 0.42


def test_who_takes_longer_has_fewer_turns() -> None:
    seen = taken(waiting(Party("long"), Party("short")), {"long": 0.5, "short": 0.01}, 1020)
    assert 45 < seen["short"] / seen["long"] < 55


def test_nobody_starves_beside_the_greatest_weight() -> None:
    parties = [Party("least", weight_of(-9)), *(Party(str(i), weight_of(9)) for i in range(3))]
    seen = taken(waiting(*parties), dict.fromkeys(["least", "0", "1", "2"], ROUND), 4000)
    assert 4 <= seen["least"] <= 8 and (parties[0].weight, parties[1].weight) == (1 / 16, 16)


def test_who_comes_late_has_saved_nothing() -> None:
    early, late = Party("early"), Party("late")
    turns = waiting(early)
    taken(turns, {"early": 0.02}, 1000)
    turns.put(Caller(late), Caller(late))
    seen = taken(turns, {"early": 0.02, "late": 0.02}, 100)
    assert abs(seen["early"] - seen["late"]) <= 2


def test_unused_turn_is_lost_when_work_ends() -> None:
    heavy, other = Party("heavy", 16.0), Party("other")
    turns = waiting(heavy, other)
    while (turn := turns.take()).work.account is not heavy:
        turns.put(turn.what, turn.what)
        turns.charge(turn, ROUND)
    turns.charge(turn, 0.001)  # of 0.16, and nothing more to do
    taken(turns, {"other": ROUND}, 1)
    assert turns._credit.get(heavy, 0.0) <= 0


def test_debt_is_forgiven_over_time() -> None:
    debtor, other = Party("debtor"), Party("other")
    turns = waiting(debtor)
    turns.charge(turns.take(), 5.0)
    turns.put(Caller(other), Caller(other))
    taken(turns, {"other": 0.1}, 60)
    turns.put(Caller(debtor), Caller(debtor))
    seen = taken(turns, {"debtor": 0.1, "other": 0.1}, 20)
    assert abs(seen["debtor"] - seen["other"]) <= 2


@pytest.mark.parametrize(("runs", "share"), [(15, FIRST_SHARE), (1, 0.5)])
def test_served_parties_go_first_within_their_share(runs: int, share: float) -> None:
    parties = [Party("serve", goes_first=True), *(Party(str(i)) for i in range(runs))]
    seen = taken(waiting(*reversed(parties)), dict.fromkeys([p.name for p in parties], ROUND), 2000)
    assert seen["serve"] / 2000 == pytest.approx(share, abs=0.03)


def test_several_that_work_together_pay_in_proportion() -> None:
    one, two = Party("one"), Party("two")
    turns: Turns[Work] = Turns()
    together = Together([Caller(one), Caller(two)], [300, 100])
    turns.put(together, together)
    turns.charge(turns.take(), 4.0)
    turns.put(Caller(one), Caller(one))
    turns.put(Caller(two), Caller(two))
    seen = taken(turns, {"one": ROUND, "two": ROUND}, 200)
    # 3 s less 1 s is what the first one owes: 2 s are 200 turns
    assert seen["two"] == pytest.approx(200, abs=2)


@pytest.mark.parametrize("order", [1, -1])
def test_joint_work_waits_as_its_greatest_party(order: int) -> None:
    least, great, busy = Party("least", weight_of(-4)), Party("great", weight_of(4)), Party("busy")
    turns = waiting(busy)
    together = Together([Caller(least), Caller(great)][::order], [1, 1])
    turns.put(together, together)
    assert taken(turns, {"busy": ROUND, "least": ROUND, "great": ROUND}, 100)["great"] > 90


class Shared(Account, Work):
    """A decode batch with these rows."""

    def __init__(self, rows: dict[Party, int]) -> None:
        self.rows = rows

    @property
    def parties(self) -> Collection[Party]:
        return self.rows

    @property
    def account(self) -> Account:
        return self

    def parts(self) -> Iterable[tuple[Account, float]]:
        return [(self, 1.0), *((party, n / sum(self.rows.values()) - 0.5) for party, n in self.rows.items())]

    def payers(self) -> dict[Payer, float]:
        return {NOBODY: 1.0}

    def wait(self, seconds: float) -> None: ...


def test_batch_has_the_weight_of_its_parties() -> None:
    """The party that has most of it owes for it."""
    many, few, training = Party("many"), Party("few"), Party("training")
    shared, turns = Shared({many: 9, few: 1}), waiting(training)
    turns.put(shared, shared)
    seen = taken(turns, {"many": ROUND, "training": ROUND}, 300)
    assert seen["many"] == pytest.approx(200, abs=4)
    assert turns._credit.get(many, 0.0) < turns._credit.get(few, 0.0) <= 0


def test_lone_party_owes_only_its_last_work() -> None:
    party = Party("a")
    turns = waiting(party)
    taken(turns, {"a": 7.0}, 100)
    assert -7.0 <= turns._credit[party] <= ROUND


@pytest.fixture
async def clocked() -> AsyncIterator[tuple[Compute, list[float]]]:
    """A compute thread and its clock, which quanta move."""
    now = [0.0]
    compute = Compute(lambda: now[0])
    yield compute, now
    compute.close()


async def test_priority_2_gets_four_times_the_quanta(
    clocked: tuple[Compute, list[float]],
) -> None:
    compute, now = clocked
    order: list[str] = []
    all_wait = threading.Event()

    async def quanta(caller: Caller) -> None:
        WORK.set(caller)

        def quantum() -> bool | None:
            all_wait.wait(60)
            order.append(caller.party.name)
            now[0] += 0.003
            return True if len(order) >= 500 else None

        await compute.until(quantum)

    callers = [Caller(Party("low", weight_of(0))), Caller(Party("high", weight_of(2)))]
    tasks = [asyncio.create_task(quanta(caller)) for caller in callers]
    await asyncio.sleep(0)
    all_wait.set()
    await asyncio.gather(*tasks)
    seen = Counter(order)
    assert 3.5 < seen["high"] / seen["low"] < 4.5
    assert callers[0].waited == pytest.approx(seen["high"] * 0.003, abs=0.04) == callers[0].party.waited
    assert callers[1].waited == pytest.approx(seen["low"] * 0.003, abs=0.04)


async def test_results_of_several_quanta_come_in_their_order(clocked: tuple[Compute, list[float]]) -> None:
    compute, _ = clocked
    assert await compute.each(partial(abs, -i) for i in range(5)) == [0, 1, 2, 3, 4]
    assert await compute.each([]) == []


async def held_in_order(lock: TurnLock, now: list[float], parties: Sequence[Party], each: int) -> list[str]:
    """Who held the lock, for as many seconds as it took turns so far."""
    order: list[str] = []

    async def hold(party: Party) -> None:
        WORK.set(Caller(party))
        await lock.acquire()
        order.append(party.name)
        await asyncio.sleep(0)
        now[0] += ROUND
        lock.release()

    await asyncio.gather(*(hold(party) for _ in range(each) for party in parties))
    return order


async def test_lock_goes_by_weight() -> None:
    now = [0.0]
    low, high = Party("low"), Party("high", 4.0)
    order = await held_in_order(TurnLock(lambda: now[0]), now, [low, high], 40)
    assert 28 <= Counter(order[:40])["high"] <= 36 and low.waited > high.waited > 0


async def test_lock_skips_cancelled_waiters() -> None:
    lock = TurnLock()
    await lock.acquire()
    waiting = [asyncio.create_task(lock.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    lock.release()
    waiting[1].cancel()  # in the moment in which its turn has come
    await asyncio.wait_for(waiting[2], 60)
    assert [task.cancelled() for task in waiting] == [True, True, False]
    lock.release()
    await asyncio.wait_for(lock.acquire(), 60)


def test_calls_without_a_run_are_served_first() -> None:
    parties = Parties()
    parties.joins("sorter", 3)
    served, run = (
        parties.caller(Call(1, "serve", None)),
        parties.caller(Call(2, "generate", None, run="sorter")),
    )
    assert (served.party.goes_first, run.party.goes_first, run.party.weight) == (True, False, 8.0)
    parties.leaves("sorter")
    assert parties.of("sorter").weight == 1.0


def test_what_nobody_asked_for_is_the_pools_own() -> None:
    assert WORK.get() is POOL
