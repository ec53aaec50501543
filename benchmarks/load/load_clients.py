"""200 people at once, in one process:
`python -m benchmarks.load.load_clients SOCKET RUN[,RUN…] CLIENTS SECONDS`.

Of ten clients two repeat `list`, two `show`, two follow a log, and four follow events. They ask as the
commands do: a connection for each request. Prints {kind: {count, errors: {words: count}, p50, p99, max}},
milliseconds, as JSON.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import Any

# seconds between two requests: --watch, a dashboard, logs -f
PAUSES = {"list": 2.0, "show": 2.0, "logs": 0.5}
KINDS = ("list", "show", "logs", "events", "events") * 2


class Crowd:
    """What all of them saw."""

    def __init__(self, socket: str, runs: list[str], seconds: float) -> None:
        self.socket, self.runs, self.ending = socket, runs, time.monotonic() + seconds
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.errors: defaultdict[str, Counter[str]] = defaultdict(Counter)

    async def client(self, number: int) -> None:
        kind, chance = KINDS[number % len(KINDS)], random.Random(number)
        run = self.runs[number % len(self.runs)]
        await asyncio.sleep(chance.uniform(0.0, 2.0))
        offset = -65536  # of the log, then where its reader is
        while time.monotonic() < self.ending:
            began = time.monotonic()
            try:
                if kind == "events":
                    await self.follow(run)
                else:
                    offset = (await self.ask(kind, run, offset)).get("offset", offset)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.errors[kind][f"{type(error).__name__}: {error}"[:120]] += 1
            self.times[kind].append(1e3 * (time.monotonic() - began))
            await asyncio.sleep(PAUSES.get(kind, 0.0) * chance.uniform(0.8, 1.2))

    async def ask(self, kind: str, run: str, offset: int) -> dict[str, Any]:
        path = {
            "list": "/v1/runs?all=0",
            "show": f"/v1/runs/{run}",
            "logs": f"/v1/runs/{run}/logs?offset={offset}",
        }
        answer: dict[str, Any] | list[Any] = {}
        async for part in self.get(path[kind], close=True):
            answer = json.loads(part.partition(b"\r\n\r\n")[2])
        return answer if isinstance(answer, dict) else {}

    async def follow(self, run: str) -> None:
        """Events of one run until the end: the time of this is that of the first byte."""
        async for _ in self.get(f"/v1/events?after=-1&run={run}", close=False):
            if time.monotonic() >= self.ending:
                return

    async def get(self, path: str, *, close: bool) -> AsyncIterator[bytes]:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        try:
            word = "close" if close else "keep-alive"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: lorad\r\nConnection: {word}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise ValueError(head.split(b"\r\n")[0].decode())
            if close:
                yield head + await reader.read(-1)
                return
            while True:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + 15.0):
                    part = await reader.read(1 << 16)
                if not part:
                    raise ValueError("the stream ended")
                yield part
        finally:
            writer.close()


def told(times: list[float], errors: Counter[str]) -> dict[str, object]:
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
    return {
        "count": len(times),
        "errors": errors,
        "p50": cuts[49],
        "p99": cuts[98],
        "max": max(times, default=0.0),
    }


async def main() -> None:
    socket, runs, count, seconds = sys.argv[1:]
    crowd = Crowd(socket, runs.split(","), float(seconds))
    await asyncio.gather(*(crowd.client(number) for number in range(int(count))))
    print(json.dumps({kind: told(crowd.times[kind], crowd.errors[kind]) for kind in sorted(set(KINDS))}))


if __name__ == "__main__":
    asyncio.run(main())
