"""Streams of chunks, each of the version that was asked for, `generate` for a run and `serve` for everybody
else; and `rank`, log-probabilities of texts.

Each chunk goes out as it comes, unless nobody reads chunks or samples as they come: then the chunks of a
second go together, for whoever counts them.
"""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

import numpy as np

from lorad.engines.base import BASE
from lorad.errors import AttestationFailed, LoradError
from lorad.models.turns import Payer, caller
from lorad.pool.state import Pool
from lorad.protocol.batch import Chunk, Chunks, Ranked
from lorad.protocol.calls import Call, Generate, Generated, Rank

GATHER_SECONDS = 1.0
_Items = AsyncGenerator[Chunks | Generated, None]


async def generate(pool: Pool, call: Call, args: Generate) -> _Items:
    """Stream chunks to a run. Raises Conflict for a version that is not one of the run's attested ones or
    `base`; Fenced when superseded.
    """
    request = pool.request(call)
    with pool.fence(call.run).stream(call, request) as check:
        tenant = pool.tenant(call)
        name = BASE if args.version == BASE else tenant.attested(args.version).engine_name
        async for item in _stream(pool, call.run, request, name, args, check):
            yield item


async def serve(pool: Pool, call: Call, args: Generate) -> _Items:
    """Stream chunks to everybody else. Raises NotFound for a version that is not loaded."""
    request = pool.request(call)
    caller().payer = payer_of(args.version, args.alias)
    if args.version == BASE:
        async for item in _stream(pool, "", request, BASE, args, lambda: None):
            yield item
        return
    with pool.loaded.use(args.version) as entry:
        async for item in _stream(pool, "", request, entry.engine_name, args, lambda: None):
            yield item


def payer_of(version: str, alias: str = "") -> Payer:
    """Return who is billed for what is served of a version: its run."""
    return Payer(version.rpartition("@")[0], 0, alias)


async def rank(pool: Pool, _call: Call, args: Rank) -> Ranked:
    """Return log-probabilities of texts. Raises NotFound for a version that is not loaded."""
    caller().payer = payer_of(args.version)
    async with pool.phases.serving():
        if args.version == BASE:
            ranked = await pool.engine.ranked(BASE, args.texts, args.starts, args.most)
        else:
            with pool.loaded.use(args.version) as entry:
                ranked = await pool.engine.ranked(entry.engine_name, args.texts, args.starts, args.most)
    if not np.isfinite(ranked.logprobs).all() or not np.isfinite(ranked.top_logprobs).all():
        raise LoradError(f"{args.version} gives no finite log-probabilities of this text", hint="Check it.")
    return ranked


async def _stream(
    pool: Pool, run: str, request: str, name: str, args: Generate, check: Callable[[], None]
) -> _Items:
    started = time.perf_counter()
    samples = 0
    tokens = 0
    unsent = list[Chunk]()
    sent_at = started
    positions = {prompt.id: position for position, prompt in enumerate(args.prompts)}
    generating = cast(
        "AsyncGenerator[Chunk, None]", pool.engine.generate(request, name, args.prompts, args.sampling)
    )
    try:
        async with aclosing(pool.phases.stream(run, generating)) as chunks:
            async for chunk in chunks:
                check()
                if chunk.version != name:
                    raise AttestationFailed(
                        f"the engine answered with tokens of {chunk.version} when it was asked for {name}",
                        hint="Nothing of this call may be used; the log of the pool shows what the engine "
                        "did.",
                    )
                samples += chunk.finish is not None
                tokens += chunk.tokens.size
                pool.ledger.add(**{"generated" if run else "served": chunk.tokens.size})
                unsent.append(chunk)
                is_due = time.perf_counter() - sent_at >= GATHER_SECONDS
                if args.sampling.stream or args.sampling.as_they_end or is_due:
                    yield Chunks.of(args.version, unsent, positions)
                    unsent = []
                    sent_at = time.perf_counter()
    finally:  # the prompts of the call are billed, however it ends
        pool.ledger.add(prompts=caller().prompts, cached=caller().cached)
    check()
    if unsent:
        yield Chunks.of(args.version, unsent, positions)
    yield Generated(samples, tokens, time.perf_counter() - started, caller().waited)
