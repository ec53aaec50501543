"""Ask one version for completions, in the pool of its base."""

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from lorad.bounds import POOL_TOKENS
from lorad.client.requests import GenerateRequest
from lorad.client.requests import Sampling as Wish
from lorad.client.shapes import Completion, Generated
from lorad.daemon.access import must_see
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.pools.as_owner import connection_to, in_thread
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.doing import doing
from lorad.daemon.runs.bases import refuse_other_base
from lorad.daemon.runs.versions import await_bytes, find_version, in_hand
from lorad.daemon.serving.borrow_pool import guest, is_chat, load_of, waited_for
from lorad.errors import PoolLost, SpecError
from lorad.models.facts import read_facts
from lorad.protocol.batch import Chunk, Chunks, Prompt, Sampling
from lorad.protocol.calls import Generate
from lorad.protocol.heartbeat import Count, Tell
from lorad.rl.data import with_system
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.store import runs
from lorad.store.rows import VersionRow


async def generate(ctx: Context, call: Call) -> Generated:
    """Complete a prompt with a version.

    Raises NotFound, Conflict (no device is free), PoolLost, and what the pool refuses.
    """
    body = call.json(GenerateRequest)
    count = body.sampling.n * max(1, len(body.prompts))
    if count * body.sampling.max_new_tokens > POOL_TOKENS:
        message = f"{count} completions of {body.sampling.max_new_tokens} tokens are too many for one request"
        raise SpecError(message, hint="Ask several times, or for shorter ones.")
    version = find_version(ctx, body.version)
    run = must_see(ctx, call.caller, runs.get(ctx.store, version.run))
    with in_hand(ctx, version):
        async with guest(ctx, run) as pool:
            refuse_other_base(ctx, run, pool)
            await await_bytes(ctx, version)
            data = spec_of(run).data if await is_chat(ctx, run) else None
            doing().tell(f"loading {version.name}")
            wish = partial(_ask, ctx, pool, version, body, data, doing().tell)
            completions = await in_thread(ctx, pool.setup.owner, wish)
    return Generated(version.name, completions)


def _ask(
    ctx: Context, pool: Pool, version: VersionRow, body: GenerateRequest, chat: Data | None, tell: Tell
) -> list[Completion]:
    """List the completions, in order of their index; runs in a thread. chat: how the run makes chats of its
    prompts. tell: says how many have ended.
    """
    wish, user = body.sampling, ctx.user(pool.setup.owner)
    process = None if user is None else (user.command([], Path("/")), user.environment)
    with as_user(user):
        tokenizer = Tokenizer(Path(pool.setup.model_path), user=process)
    asked = body.prompts or [_tokenize(tokenizer, body.prompt, chat)]
    with as_user(user):
        for tokens in asked:
            _check_length(len(tokens), wish.max_new_tokens, Path(pool.setup.model_path))
    prompts = _prompts(asked, body.seeds, wish)
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
    found = {(p.id, index): Completion("") for p in prompts for index in range(p.seeds.size)}
    with connection_to(ctx, pool) as connection, waited_for(ctx, connection):
        connection.call("load_version", load_of(version))
        count = Count("sampling", len(found), tell)
        for item in connection.stream("serve", Generate(version.name, prompts, sampling)):
            for chunk in item.split(prompts) if isinstance(item, Chunks) else ():
                take(chunk, found, wish.max_new_tokens)
                count.add(tokens=chunk.tokens.size, ended=chunk.finish is not None)
    return [replace(one, text=tokenizer.completion(one.tokens, wish.stop)) for one in found.values()]


def _prompts(asked: Sequence[list[int]], seeds: Sequence[list[int]], wish: Wish) -> list[Prompt]:
    """Raises SpecError for seeds that do not fit the prompts."""
    usual = wish.seed + np.arange(wish.n, dtype=np.uint64)
    if seeds and (len(seeds) != len(asked) or any(len(some) != wish.n for some in seeds)):
        raise SpecError(f"the seeds are not {wish.n} of each prompt", hint="Leave them out.")
    if any(seed >= 2**64 for some in seeds for seed in some):
        raise SpecError("a seed has more than 64 bits", hint="Leave it out.")
    return [
        Prompt(str(place), np.array(tokens, np.int32), np.array(seeds[place], np.uint64) if seeds else usual)
        for place, tokens in enumerate(asked)
    ]


def take(chunk: Chunk, found: dict[tuple[str, int], Completion], most: int) -> None:
    """Raises PoolLost for what no pool answers to the question: it is a process of a user's."""
    one = found.get((chunk.prompt, chunk.index))
    if one is None or len(one.tokens) + chunk.tokens.size > most:
        raise PoolLost(
            "the pool answers with more than it was asked for", hint="Is it another version of lorad?"
        )
    found[chunk.prompt, chunk.index] = replace(
        one, tokens=one.tokens + chunk.tokens.tolist(), finish=chunk.finish or one.finish
    )


def _check_length(prompt: int, new: int, model: Path) -> None:
    limit = read_facts(model).max_positions
    if prompt == 0:
        raise SpecError("the prompt is empty", hint="A completion begins with at least one token.")
    if prompt + new > limit:
        raise SpecError(
            f"a prompt of {prompt} tokens and {new} new ones exceed the {limit} positions of the model",
            hint="Shorten the prompt or lower max_new_tokens.",
        )


def _tokenize(tokenizer: Tokenizer, text: str, chat: Data | None) -> list[int]:
    """Tokenize a prompt in the way that the run tokenizes its own prompts."""
    if chat is None:
        return tokenizer.encode(text, special=True)
    messages = with_system(chat, [{"role": "user", "content": text}])
    with contextlib.closing(tokenizer):
        return tokenizer.encode(tokenizer.chat(messages, chat.chat_template_kwargs))
