"""Connections that ask slowly or never, and readers that never read, beside one that lists every 100 ms.

    python -m faults.slowloris [--connections 300] [--seconds 45] [--seed 0]

Prints for each kind how many were opened, how many were let go of and when, and what `list` took before and
meanwhile. Exits 1 when one stays beyond its time, or a list fails.
"""

import argparse
import contextlib
import random
import select
import socket
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from lorad.bounds import Bounds
from lorad.errors import LoradError
from tests.kit.world import World, world

GET = b"GET /v1/runs HTTP/1.1\r\nHost: lorad\r\n"
POST = b"POST /v1/runs HTTP/1.1\r\nHost: lorad\r\nContent-Length: 4000\r\n\r\n"
LONG = b"GET /v1/" + b"a" * 7000 + b" HTTP/1.1\r\nHost: lorad\r\n\r\n"  # its answer names all of it
SLACK = 3.0  # seconds that a busy machine may add
TICK = 0.1
EVERY = 0.1
BOUNDS = Bounds()
SOON, LATER, LATEST = BOUNDS.head + 1.0, BOUNDS.write + 1.0, BOUNDS.idle + 1.0


@dataclass
class Kind:
    """first: what it sends at once; then, byte by byte, `rest`. within:
    seconds after which it must be gone.
    """

    name: str
    first: bytes
    rest: bytes = b""
    reads: bool = True
    within: float = SOON


KINDS = (
    Kind("silent", b""),
    Kind("one byte", b"G"),
    Kind("half a head", GET),
    Kind("half a body", POST + b'{"spec": '),
    Kind("head, byte by byte", b"", GET + b"X-A: " + b"a" * 4000),
    Kind("body, byte by byte", POST, b" " * 4000),
    Kind("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    Kind("silent after an answer", GET + b"\r\n", within=LATEST),
    Kind("asks on, never reads", LONG * 60, reads=False, within=LATER),
)


@dataclass
class Attacker:
    kind: Kind
    socket: socket.socket
    opened: float
    sent: int = 0
    gone: float | None = None

    def tick(self, now: float) -> None:
        """Send the next byte each second, and see whether the daemon let go of it."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN if self.kind.reads else 0)
        for _, what in poll.poll(0):
            if what & (select.POLLHUP | select.POLLERR) or (what & select.POLLIN and not self.take()):
                self.gone = now - self.opened
                self.socket.close()
                return
        if self.kind.rest and now - self.opened > self.sent:
            with contextlib.suppress(OSError):
                self.socket.send(self.kind.rest[self.sent : self.sent + 1])
            self.sent += 1

    def take(self) -> bytes:
        try:
            return self.socket.recv(1 << 16)
        except OSError:
            return b""


@dataclass
class Lister:
    """What each list took, in milliseconds, and what went wrong."""

    made: World
    times: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def once(self) -> None:
        began = time.perf_counter()
        try:
            self.made.client.list()
        except LoradError as error:
            self.errors.append(str(error))
        self.times.append(1e3 * (time.perf_counter() - began))

    def go_on(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY):
            self.once()

    def told(self) -> str:
        cuts = statistics.quantiles(self.times, n=100)
        return f"p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms of {len(self.times)}, {len(self.errors)} failed"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with world() as made:
        made.lorad("daemon", "start")
        before, meanwhile = Lister(made), Lister(made)
        for _ in range(30):
            before.once()
        attackers = attack(made, meanwhile, options.connections, options.seconds, random.Random(options.seed))
        return report(before, meanwhile, attackers, options.seconds)


def attack(made: World, lister: Lister, count: int, seconds: float, chance: random.Random) -> list[Attacker]:
    ended = threading.Event()
    listing = threading.Thread(target=lister.go_on, args=(ended,))
    listing.start()
    try:
        attackers = [opened(made.home.socket, KINDS[n % len(KINDS)]) for n in range(count)]
        chance.shuffle(attackers)
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(one.gone is None for one in attackers):
            now = time.monotonic()
            for one in attackers:
                if one.gone is None:
                    one.tick(now)
            time.sleep(TICK)
    finally:
        ended.set()
        listing.join()
    return attackers


def opened(path: Path, kind: Kind) -> Attacker:
    one = socket.socket(socket.AF_UNIX)
    if not kind.reads:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.settimeout(5)
    one.connect(str(path))
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        one.send(kind.first)
    return Attacker(kind, one, time.monotonic())


def report(before: Lister, meanwhile: Lister, attackers: list[Attacker], seconds: float) -> int:
    print(f"{'kind':<24} {'opened':>6} {'let go':>6} {'first s':>8} {'last s':>7} {'at most':>8}")
    wrong = []
    for kind in KINDS:
        mine = [one for one in attackers if one.kind is kind]
        gone = sorted(one.gone for one in mine if one.gone is not None)
        ends = f"{gone[0]:8.1f} {gone[-1]:7.1f}" if gone else f"{'':8} {'':7}"
        print(f"{kind.name:<24} {len(mine):>6} {len(gone):>6} {ends} {kind.within:7.0f}s")
        due = seconds >= kind.within + SLACK
        if (due and len(gone) < len(mine)) or (gone and gone[-1] > kind.within + SLACK):
            wrong.append(f"{kind.name}: beyond {kind.within:.0f} s")
    print(f"list before:    {before.told()}\nlist meanwhile: {meanwhile.told()}")
    wrong += [*before.errors, *meanwhile.errors][:5]
    for line in wrong:
        print(f"WRONG  {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
