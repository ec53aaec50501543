"""Ask one version for completions, in the pool of its base."""

from contextlib import aclosing

import msgspec

from lorad.bounds import COMPLETIONS, POOL_TOKENS
from lorad.children.ask import lines_of, under_guard
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.process.doing import doing
from lorad.daemon.runs.bases import refuse_other_base
from lorad.daemon.runs.versions import await_bytes, find_version, in_hand
from lorad.daemon.serving.asking import AnswerLine, PoolQuestion
from lorad.daemon.serving.borrow_pool import hold_pool, is_chat, load_of
from lorad.errors import PoolLost, SpecError, from_wire
from lorad.records.requests import GenerateRequest
from lorad.store import runs

_WORDS = 100  # characters of what is being done
_LINE_BYTES = 32 << 20  # all completions: a million tokens and their text are less


async def generate(ctx: Context, call: Call) -> msgspec.Raw:
    """Complete prompts with a version, and answer with the JSON of a Generated from the pool owner's process.

    Raises NotFound, Conflict (no device is free), PoolLost, and what the pool refuses.
    """
    body = call.json(GenerateRequest)
    count = body.sampling.n * max(1, len(body.prompts))
    if count > COMPLETIONS or count * body.sampling.max_new_tokens > POOL_TOKENS:
        message = f"{count} completions of {body.sampling.max_new_tokens} tokens are too many for one request"
        most = f"{COMPLETIONS} completions, and {POOL_TOKENS} tokens of them all"
        hint = f"Ask several times: one takes {most}."
        raise SpecError(message, hint=hint)
    version = find_version(ctx, call.caller, body.version)
    run = runs.get(ctx.store, version.run)
    async with ctx.users.asks.turn(call.caller.uid):
        with in_hand(ctx, version):
            async with hold_pool(ctx, run) as pool:
                refuse_other_base(ctx, run, pool)
                await await_bytes(ctx, version)
                chat = spec_of(run).data if await is_chat(ctx, run) else None
                doing().tell(f"loading {version.name}")
                where = pool.setup.socket, pool.setup.model_path
                return await _ask(ctx, pool, PoolQuestion(*where, load_of(version), chat, body))


async def _ask(ctx: Context, pool: Pool, question: PoolQuestion) -> msgspec.Raw:
    """Have a process of the pool's owner ask the pool, and tell the request what it does meanwhile."""
    user = ctx.user(pool.setup.owner)
    argv, env = ctx.processes.commands.asked_as(user, ctx.processes.commands.completer, ctx.home)
    what = "the process that asks the pool"
    async with (
        under_guard(argv, env, limit=_LINE_BYTES) as process,
        aclosing(lines_of(process, what, msgspec.json.encode(question))) as lines,
    ):
        async for line in lines:
            try:
                part = msgspec.json.decode(line, type=AnswerLine)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                raise PoolLost(f"{what} said something else than an answer", hint="Try again.") from None
            if part.error is not None:
                raise from_wire(msgspec.to_builtins(part.error))
            if bytes(part.answer):
                return part.answer
            doing().tell(part.doing[:_WORDS])
    raise AssertionError("the lines end with an answer or an error")
