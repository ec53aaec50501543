"""Ask one version for completions, in the pool of its base."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from lorad.daemon.context import Context, spec_of
from lorad.daemon.place import groups, room_for, setup_of
from lorad.daemon.pool import Pool
from lorad.daemon.pools import ask_status, find_or_make, look_at_process, start_pool
from lorad.daemon.processes import log_tail
from lorad.daemon.request import Call
from lorad.daemon.versions import find_version
from lorad.errors import Conflict, PoolLost, SpecError
from lorad.models.facts import read_facts
from lorad.protocol.batch import Prompt, Sampling
from lorad.protocol.calls import Generate, LoadVersion
from lorad.protocol.connection import Connection
from lorad.rl.tasks import TASKS
from lorad.rl.tokenizer import Tokenizer
from lorad.specs import Data, NonNegative, NonNegativeFloat, Positive, Seed
from lorad.store import runs
from lorad.store.db import Row

POLL_SECONDS = 0.1


class Wish(Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample; the defaults are those of a quick look."""

    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    max_new_tokens: Positive = 64
    seed: Seed = 0
    stop: list[str] = []


class Body(Struct):
    version: str
    prompt: str
    sampling: Wish = Wish()


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    """Raises NotFound, Conflict (no device is free), PoolLost, and what the pool refuses."""
    body = call.json(Body)
    version = find_version(ctx, body.version)
    run = runs.get(ctx.store, version["run"])
    pool, data = await admitted(ctx, run), spec_of(run).data
    pool.guests += 1
    try:
        await ready(ctx, pool)
        completions = await asyncio.to_thread(ask, ctx, pool, version, data, body)
    finally:
        pool.guests, pool.used_at = pool.guests - 1, time.monotonic()
        ctx.waker.poke()
    return {"version": name_of(version), "completions": completions}


def name_of(version: Row) -> str:
    return f"{version['run']}@{version['version']}"


async def admitted(ctx: Context, run: Row) -> Pool:
    """`pool_for`, when the idle pools that are in its way have stopped."""
    deadline = time.monotonic() + ctx.patience.pool_shutdown + ctx.patience.pool_term
    while True:
        try:
            return pool_for(ctx, run)
        except Conflict:
            stopping = any(pool.process.is_up and pool.stop_asked is not None for pool in ctx.pools.values())
            if not stopping or time.monotonic() > deadline:
                raise
            await asyncio.sleep(POLL_SECONDS)


def pool_for(ctx: Context, run: Row) -> Pool:
    """The pool of the run's base, being started unless it is up; a pool that trains serves as well."""
    setups = {devices: setup_of(ctx, run, devices, any_threads=True)[0] for devices in groups(ctx, run)}
    keys = {setup.key for setup in setups.values()}
    for pool in ctx.pools.values():
        look_at_process(ctx, pool)
        if pool.setup.key in keys and pool.process.is_up and pool.stop_asked is None:
            return pool
    devices, reason = room_for(ctx, setups)
    if devices is None:
        raise Conflict(f"no device is free for {run['name']}'s base: {reason}", hint="Try again later.")
    pool = find_or_make(ctx, setups[devices])
    start_pool(ctx, pool)
    return pool


async def ready(ctx: Context, pool: Pool) -> None:
    """Until it has answered once. Raises PoolLost when it ends before, or takes too long."""
    deadline = time.monotonic() + ctx.patience.pool_ready
    while pool.status is None:
        look_at_process(ctx, pool)
        if not pool.process.is_up or time.monotonic() > deadline:
            tail = log_tail(pool.attempt().log, 3)
            raise PoolLost(f"pool {pool.id} {pool.process.in_words()} before it answered: {tail}", hint="Try again.")
        await ask_status(ctx, pool)
        await asyncio.sleep(POLL_SECONDS)


def ask(ctx: Context, pool: Pool, version: Row, data: Data, body: Body) -> list[dict[str, Any]]:
    """The completions, in order of their index; runs in a thread."""
    tokenizer, wish = Tokenizer(Path(pool.setup.model_path)), body.sampling
    tokens = np.array(tokenize(tokenizer, body.prompt, data), np.int32)
    check_length(len(tokens), wish.max_new_tokens, Path(pool.setup.model_path))
    prompts = [Prompt("prompt", tokens, wish.seed + np.arange(wish.n, dtype=np.uint64))]
    sampling = Sampling(
        logprobs=False,
        max_new_tokens=wish.max_new_tokens,
        temperature=wish.temperature,
        top_p=wish.top_p,
        top_k=wish.top_k,
        stop_token_ids=tuple(tokenizer.eos_ids),
        stop=tuple(wish.stop),
        stream=False,
    )
    found: dict[int, dict[str, Any]] = {i: {"text": "", "tokens": [], "finish": None} for i in range(wish.n)}
    with Connection(Path(pool.setup.socket)) as connection, waited_for(ctx, connection):
        load = LoadVersion(name_of(version), version["path"], version["sha256"])
        connection.call("load_version", load)
        *items, _ = connection.stream("serve", Generate(name_of(version), prompts, sampling))
    for chunk in chain.from_iterable(item.split(prompts) for item in items):
        found[chunk.index]["tokens"] += chunk.tokens.tolist()
        found[chunk.index]["finish"] = chunk.finish or found[chunk.index]["finish"]
    return [one | {"text": tokenizer.decode(one["tokens"])} for one in found.values()]


@contextlib.contextmanager
def waited_for(ctx: Context, connection: Connection) -> Iterator[None]:
    """A daemon that ends aborts it."""
    ctx.waiting.add(connection)
    try:
        yield
    finally:
        ctx.waiting.discard(connection)


def check_length(prompt: int, new: int, model: Path) -> None:
    limit = read_facts(model).max_positions
    if prompt == 0:
        raise SpecError("the prompt is empty", hint="A completion begins with at least one token.")
    if prompt + new > limit:
        raise SpecError(
            f"a prompt of {prompt} tokens and {new} new ones exceed the {limit} positions of the model",
            hint="Shorten the prompt or lower max_new_tokens.",
        )


def tokenize(tokenizer: Tokenizer, text: str, data: Data) -> list[int]:
    """As the run's own prompts were: with the chat template, unless it trained on plain text."""
    if data.chat_template == "auto" and data.train not in TASKS and tokenizer.has_chat_template:
        return tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]))
    return tokenizer.encode(text, special=True)
