"""Random requests on every route, and random lives of runs against a model.

    python -m faults.fuzz [--seconds 60] [--seed 0]

Half of the time goes to requests: never a defect (500), never a hang, and afterwards the daemon answers and
its database is whole. The other half goes to moves of runs, see `fuzz_moves.py`. Exits 1 on the first
violation.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from faults.fuzz_moves import explore
from faults.hostile import request
from lorad.bounds import Bounds
from lorad.daemon.api.verbs import ROUTES
from lorad.errors import LoradError
from lorad.http import bounded
from lorad.store.check import check
from tests.kit.daemon_world import Api, finished, serving
from tests.kit.leftovers import kill_leftovers

QUICK = Bounds(head=1.0, body=1.0, idle=2.0, write=5.0)
HANG = 30.0  # seconds without an answer
SKIPPED = {"/v1/shutdown"}
KEPT = {("DELETE", "/v1/runs/{run}"): "/v1/runs/b"}  # what others are to find stays
AT_ONCE = 12
PROBLEMS = 3  # shown


class Violation(Exception):
    """What must never be was."""


async def pelt(home: Path, seconds: float, seed: int) -> Counter[str]:
    """Status by how often it was answered."""
    chance, found = random.Random(seed), Counter[str]()
    routes = [(method, KEPT.get((method, path), path)) for method, path, *_ in ROUTES if path not in SKIPPED]
    routes.append(("GET", "/{nowhere}"))
    async with serving(home, bounds=QUICK) as api:
        finished(api.ctx, "a")
        until = time.monotonic() + seconds

        async def ask() -> None:
            while time.monotonic() < until:
                one = request(chance, *chance.choice(routes))
                found[judged(one, await answered(api, one))] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(ask())
        await api("list", all=True)
        await api("show", "a")
        whole = check(api.ctx.home.database)
        if whole.problems:
            raise Violation(f"the database is damaged: {whole.problems[:PROBLEMS]}")
    return found


async def answered(api: Api, data: bytes) -> bytes:
    """The beginning of the answer, "" where the daemon let go without one."""
    reader, writer = await asyncio.open_unix_connection(api.ctx.home.socket)
    try:
        async with asyncio.timeout(HANG):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                answer = b""
                while part := await reader.read(1 << 16):
                    answer += part
                    if b"x-ndjson" in answer or len(answer) > 1 << 20:
                        break
                return answer
    except TimeoutError:
        raise Violation(f"no answer within {HANG:.0f} s to {data[:2000]!r}") from None
    finally:
        writer.transport.abort()
    return b""


def judged(asked: bytes, answer: bytes) -> str:
    """The status. Raises Violation for a defect, and for an error without words."""
    if not answer:
        return "none"
    head, _, rest = answer.partition(b"\r\n\r\n")
    status = head.split()[1].decode()
    if status == "500" or not status.isdigit():
        raise Violation(f"{asked[:3000]!r}\nwas answered with {answer[:3000].decode(errors='replace')}")
    if status >= "400" and not asked.startswith(b"HEAD"):
        error = json.loads(rest)["error"]
        if not error["message"]:
            raise Violation(f"{asked[:3000]!r}\nwas refused without a word")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bounded.LOOK = 0.2
    with tempfile.TemporaryDirectory(prefix="lr-", ignore_cleanup_errors=True) as directory:
        os.environ["LORAD_HOME"] = directory
        try:
            found = asyncio.run(pelt(Path(directory), options.seconds / 2, options.seed))
            told = ", ".join(f"{status}: {count}" for status, count in sorted(found.items()))
            count = len(ROUTES) - len(SKIPPED)
            print(f"{found.total()} requests on {count} routes, none a defect ({told})", flush=True)
        except (Violation, LoradError) as error:
            print(f"VIOLATION (seed {options.seed})\n{error}")
            return 1
        finally:
            kill_leftovers(Path(directory))
    moves = explore(options.seconds / 2, options.seed)
    print(f"{moves.examples} lives, {moves.moves} moves, none against the model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
