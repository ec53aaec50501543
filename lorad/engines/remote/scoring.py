"""Log-probabilities of given completions, as one server says them, or each of several."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np

from lorad.engines.remote.http import NotFinite, ServerGone, ServerRefused
from lorad.engines.remote.server import Server
from lorad.protocol.batch import Batch

SCORE_SECONDS = 120.0  # for one prompt and completion
SCORING = 16  # under way at once on one server

_calls = itertools.count()


async def score(server: Server, name: str | None, batch: Batch) -> np.ndarray:
    """Score a batch on one server, whatever its state; returns float32 [T]. name: None is the base.

    Raises ServerGone when the server died meanwhile, NotFinite, ServerRefused, ServerSilent; no request is
    left running.
    """
    batch.check()
    limit, call = asyncio.Semaphore(SCORING), next(_calls)

    async def one(number: int, prompt: np.ndarray, completion: np.ndarray) -> np.ndarray:
        async with limit:
            with server.working():
                asked = (f"score/{call}/{number}.", name, prompt.tolist(), completion.tolist())
                return await server.within(server.dialect.score(server.http, *asked), SCORE_SECONDS)

    pairs = [(prompt, completion) for prompt, group in batch.groups() for completion in group]
    tasks = [asyncio.create_task(one(number, *pair)) for number, pair in enumerate(pairs)]
    try:
        found = np.concatenate(await asyncio.gather(*tasks)).astype(np.float32)
    except ServerRefused as refused:
        raise await server.judged(refused, name) from refused
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not np.isfinite(found).all():
        raise NotFinite(f"{server} scored without a finite log-probability for every token")
    return found


async def scores(servers: Sequence[Server], name: str | None, batch: Batch) -> list[np.ndarray]:
    """Score a batch on each server. Raises ServerGone when some died, once it is known which; other errors
    come first.

    Servers that were not finite are given up.
    """
    outcomes = await asyncio.gather(
        *(score(server, name, batch) for server in servers), return_exceptions=True
    )
    of = list(zip(servers, outcomes, strict=True))
    for server in [server for server, outcome in of if isinstance(outcome, NotFinite)]:
        server.lose()
    gone = [server for server, outcome in of if isinstance(outcome, ServerGone | NotFinite)]
    await asyncio.gather(*(server.suspected() for server in gone))
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in sorted(failed, key=lambda error: isinstance(error, ServerGone)):
        raise error
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
