"""The largest and strangest requests on every route, from one user of a shared daemon, while another lists.

    python -m faults.siege [--within 200] [--only WORD] [--every 1]

Each part of each body is taken to its bound and beyond, with texts that are slow to read. Prints the worst
requests, and what `list` took of the other user. Exits 1 for a defect (500), a request without an answer, one
that takes the daemon over CPU_SECONDS of its processor, or a list that takes longer than `--within`
milliseconds (0: any time). --every 3 sends each third request, and lists a third as often.
"""

import argparse
import contextlib
import json
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from faults.siege.requests import ALIAS, RUN, WAITING, requests
from tests.daemon.test_system_mode import ALICE, BOB, Box
from tests.kit.callers import UnixConnection, become
from tests.kit.passable import PASSABLE, why_not
from tests.kit.warm.processes import python
from tests.kit.world import REPOSITORY

CPU_SECONDS = 3.0  # of the daemon, for one request
EVERY = 0.05  # seconds between two lists
SECONDS = 120.0  # for an answer
WORST = 8  # requests that are shown


class Seen(NamedTuple):
    """What came of a request. cpu: seconds of the daemon's processor."""

    route: str
    what: str
    status: int
    began: float
    seconds: float
    cpu: float
    answer: str


def attack(home: Path, only: str, every: int) -> Iterator[Seen]:
    """Send each request whose number is a multiple of `every`, one after another. only: to routes with this
    word.
    """
    pid = json.loads(answered(home, "GET", "/v1/status", None)[1])["pid"]
    for asked in islice(requests(), 0, None, every):
        if only not in f"{asked.method} {asked.route}":
            continue
        body = asked.body()
        began, cpu = time.monotonic(), cpu_of(pid)
        try:
            status, answer = answered(home, asked.method, asked.path, body)
        except OSError as error:
            status, answer = 0, repr(error).encode()
        took, used = time.monotonic() - began, cpu_of(pid) - cpu
        told = answer[:300].decode(errors="replace")
        yield Seen(f"{asked.method} {asked.route}", asked.what, status, began, took, used, told)


def answered(home: Path, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    """Return the status, and the answer or the first line of a stream."""
    connection = UnixConnection(home / "lorad.sock", SECONDS)
    try:
        with contextlib.suppress(BrokenPipeError):  # refused before all of it was sent
            connection.request(method, path, body)
        response = connection.getresponse()
        is_stream = "ndjson" in (response.getheader("Content-Type") or "")
        return response.status, response.readline() if is_stream else response.read()
    finally:
        connection.close()


def cpu_of(pid: int) -> float:
    """Seconds of processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def lists(home: Path, every: int) -> Iterator[tuple[float, float]]:
    """List until standard input ends: when each began, and what it took."""
    is_over = False
    while not is_over:
        began = time.monotonic()
        status, answer = answered(home, "GET", "/v1/runs", None)
        assert status == 200, answer
        yield began, time.monotonic() - began
        is_over = bool(select.select([sys.stdin], [], [], EVERY * every)[0])


def process_of(uid: int, role: str, home: Path, only: str = "", every: int = 1) -> subprocess.Popen[bytes]:
    """Start this program as a user, who attacks or lists."""
    command = [*PASSABLE, *python(), "-m", "faults.siege", "--as", str(uid), "--role", role]
    command += ["--home", str(home), "--only", only, "--every", str(every)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def besieged(only: str, every: int) -> tuple[list[Seen], list[tuple[float, float]]]:
    """Start a shared daemon in which one user attacks and another lists."""
    root = Path(tempfile.mkdtemp(prefix="lr-"))
    root.chmod(0o711)
    box = Box(root)
    try:
        box.run(ALICE, RUN, "trainer.steps=2")
        box.over(RUN)
        box.ask(ALICE, "POST", f"aliases/{ALIAS}", {"version": f"{RUN}@1"})
        box.ask(ALICE, "POST", "groups/night", {"limit": 0})
        box.run(ALICE, WAITING, "resources.group=night")
        lister = process_of(BOB, "list", box.home, every=every)
        attacker = process_of(ALICE, "attack", box.home, only, every)
        seen = [msgspec.json.decode(line, type=Seen) for line in attacker.communicate()[0].splitlines()]
        times = [
            msgspec.json.decode(line, type=tuple[float, float])
            for line in lister.communicate()[0].splitlines()
        ]
        assert attacker.returncode == lister.returncode == 0
        return seen, times
    finally:
        box.close()
        shutil.rmtree(root, ignore_errors=True)


def wrongs(seen: list[Seen], times: list[tuple[float, float]], within: float) -> list[str]:
    """Say what should not be. within: seconds that a list may take; 0: any time."""
    found = [f"{one.status}: {one.route}, {one.what}: {one.answer}" for one in seen if one.status in (0, 500)]
    found += [
        f"{one.cpu:.1f} s of the daemon: {one.route}, {one.what}" for one in seen if one.cpu > CPU_SECONDS
    ]
    for began, took in times if within else ():
        if took > within:
            beside = [one for one in seen if began < one.began + one.seconds and one.began < began + took]
            found.append(
                f"a list of {1e3 * took:.0f} ms, beside "
                + ", ".join(f"{one.route}: {one.what}" for one in beside)
            )
    return found


def told(seen: list[Seen], times: list[tuple[float, float]]) -> None:
    statuses = Counter(one.status for one in seen)
    words = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    print(f"{len(seen)} requests on {len({one.route for one in seen})} routes ({words})")
    for one in sorted(seen, key=lambda one: -one.cpu)[:WORST]:
        print(f"{one.cpu:6.2f} s of the daemon, {one.seconds:6.2f} s  {one.status} {one.route}, {one.what}")
    slow = sorted(took for _, took in times)
    print(f"list of the other user: {len(slow)}, median {1e3 * slow[len(slow) // 2]:.0f} ms, ", end="")
    print(f"99th of 100 {1e3 * slow[len(slow) * 99 // 100]:.0f} ms, slowest {1e3 * slow[-1]:.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--within", type=float, default=200.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--as", type=int, dest="uid", help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        become(options.uid)
        found: Iterator[Any] = lists(options.home, options.every)
        if options.role == "attack":
            found = attack(options.home, options.only, options.every)
        for one in found:
            print(msgspec.json.encode(one).decode(), flush=True)
        return 0
    if reason := why_not():
        print(f"not tried: {reason}")
        return 0
    seen, times = besieged(options.only, options.every)
    told(seen, times)
    wrong = wrongs(seen, times, options.within / 1e3)
    for line in wrong:
        print(f"WRONG  {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
