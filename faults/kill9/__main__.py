"""Kill -9 of everything, at random instants of every phase and at exact points, under several runs.

    python -m faults.kill9 --kills 200 [--seed 0] [--each 25] [--steps 14] [--kinds calm ahead]

Rounds of so many kills: in one home runs of different kinds work side by side, some in one pool. Victims are
the daemon, drivers, pools, their shims, processes of environments and rewards, several of them, or
everything; instants are random within a phase
(starting, resume, sampling, training, publish, recording, checkpoint, evaluating, stopping, idle, the
daemon's start), or exact: before and after each rename, fsync, commit and journal record, between a shim's
fork and its status, amid a migration. Meanwhile clients ask, follow and command. It must hold, all through
and at the end:

- every fact that a client saw, and every command that was accepted, is there: 0 acknowledged facts lost;
- no attempt and no run has two processes, none begins twice, none outlives what it was for;
- integrity and foreign keys of the database, `lorad doctor`, the audit and `lorad verify` of each run find
    nothing;
- every run is complete, with the losses, batches, samples and the final sha256 of one that nobody disturbed.

Exits 1 after the first round in which one of these does not. The seed decides on victims, phases and points;
the rest is timing.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from faults.kill9.box import Box
from faults.kill9.oracle import exceptions, is_empty
from faults.kill9.runs import CONFIG, KINDS, Crew, completed, undisturbed
from faults.kill9.striker import EVERYTHING, Strike, Striker, deck
from faults.kill9.witness import Witness
from tests.kit.warm.starting import warm_process

Facts = dict[str, dict[str, Any]]
DEADLINE = 300.0  # seconds for all runs to complete after the last kill of a round
IDLE = (
    Strike(("pool",), "idle"),
    Strike(("daemon",), "idle"),
    Strike(("pool-shim",), "idle"),
    Strike(EVERYTHING, "idle"),
)


@dataclass
class Tally:
    """What all rounds came to."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    processes: int = 0
    runs: int = 0
    attempts: int = 0
    batches: int = 0
    resumed: int = 0
    gave_up: int = 0
    answers: int = 0
    facts: int = 0
    daemons: int = 0

    def count(self, strike: Strike, phase: str, killed: list[str]) -> None:
        self.processes += len(killed)
        if killed:
            self.kills[strike.victim, phase] += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--each", type=int, default=25, help="kills in one home")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of runs")
    parser.add_argument("--only", help="a part of the victims' names: env-host, reward, driver+pool")
    parser.add_argument("--tell", action="store_true", help="every kill, and every end of a run")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    begun, tally = time.monotonic(), Tally()
    cards = endless(random.Random(f"{options.seed}/deck"), options.only or "")
    number, found = 0, list[str]()
    with warm_process(), ThreadPoolExecutor() as beside:
        calm = beside.submit(undisturbed, options.kinds, options.steps)
        while not found and (left := options.kills - tally.kills.total()) > 0:
            number += 1
            found = play(number, min(left, options.each), cards, calm.result, tally, options)
            print("\n".join(f"  {wrong}" for wrong in found), end="\n" if found else "", flush=True)
    if found:
        return 1
    report(tally, number, time.monotonic() - begun)
    return 0


def endless(chance: random.Random, only: str) -> Iterator[Strike]:
    while cards := [card for card in deck(chance) if only in card.victim]:
        yield from cards


def play(
    number: int,
    kills: int,
    cards: Iterator[Strike],
    expected: Callable[[], Facts],
    tally: Tally,
    options: argparse.Namespace,
) -> list[str]:
    """Play one round and print a line about it; returns what was wrong."""
    begun, before = time.monotonic(), tally.kills.total()
    chances = (
        random.Random(f"{options.seed}/{number}/{part}") for part in ("box", "crew", "striker", "witness")
    )
    box = Box(next(chances), tell=options.tell)
    crew = Crew(box, options.kinds, options.steps, next(chances))
    striker, witness = Striker(box, crew, chance := next(chances)), Witness(box, crew, next(chances))
    try:
        box.home.config.write_text(CONFIG)
        for part in (box, crew, witness):
            part.open()
        idle = 2 if kills > 10 else 0
        while tally.kills.total() - before < kills - idle:
            hit(striker, next(cards), tally)
            time.sleep(chance.choice((0.0, 0.3, 0.6)) * chance.random())
        crew.busy = False
        box.say(f"{time.monotonic() - begun:.1f} s: the rest in peace")
        if box.violations:
            return box.violations
        completed(crew, DEADLINE)
        while tally.kills.total() - before < kills:
            hit(striker, chance.choice(IDLE), tally)
            time.sleep(0.3)
        for part in (witness, crew):
            part.shut()
        found = [*box.violations, *exceptions(box, crew, witness, expected())]
        box.resting = True
        found += [*is_empty(box), *(wrong for wrong in box.violations if wrong not in found)]
        add(tally, box, crew, witness)
        struck = tally.kills.total() - before
        told = f"{len(crew.names)} runs, {len(found)} exceptions ({time.monotonic() - begun:.0f} s)"
        print(f"round {number}: {struck} kills, {told}", flush=True)
        return found
    finally:
        for part in (witness, crew, box):
            part.shut()
        box.close()


def hit(striker: Striker, strike: Strike, tally: Tally) -> None:
    begun = time.monotonic()
    phase, killed = striker.strike(strike)
    after = f"after {time.monotonic() - begun:.1f} s"
    striker.box.say(
        f"{strike.victim}, {strike.point or strike.phase}: {', '.join(killed) or 'nobody'} in {phase} {after}"
    )
    tally.count(strike, phase, killed)


def add(tally: Tally, box: Box, crew: Crew, witness: Witness) -> None:
    shown = [box.last[name] for name in crew.names]
    tally.runs += len(shown)
    tally.attempts += sum(len(run.attempts) for run in shown)
    tally.batches += sum(run.step for run in shown)
    tally.resumed += crew.resumed
    tally.gave_up += crew.gave_up
    tally.answers += witness.answers
    tally.facts += len(witness.told) + len(witness.events)
    tally.daemons += box.started


def report(tally: Tally, rounds: int, seconds: float) -> None:
    victims: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    for (victim, phase), count in tally.kills.items():
        victims[victim] += count
        phases[phase] += count
    for title, counted in (("victim", victims), ("phase or point", phases)):
        print(f"\n{title:<30} kills")
        for name, count in counted.most_common():
            print(f"{name:<30} {count:>5}")
    print(
        f"\n{tally.kills.total()} kills of {tally.processes} processes in {rounds} homes; {tally.runs} runs "
        f"complete in {tally.attempts} attempts ({tally.resumed} resumed by hand, {tally.gave_up} after "
        f"giving up), {tally.daemons} daemons\n"
        f"{tally.facts} facts told in {tally.answers} answers: 0 lost; 0 orphans; 0 doubled starts; "
        f"0 damaged databases; {tally.runs} of {tally.runs} runs with the sha256 of undisturbed ones "
        f"({seconds:.0f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
