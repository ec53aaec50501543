"""Keep a base warm, and serve adapters from PEFT directories by names of their own: all or none of them."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from lorad.adapters.adapter import Outline
from lorad.adapters.directory import discard
from lorad.adapters.peft import outline
from lorad.daemon.access import must_own_name, of_alias, of_run, owns
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.aliases import move, publish_move
from lorad.daemon.context import Context, Request, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.pools.as_owner import in_thread, on_behalf
from lorad.daemon.pools.life import refresh
from lorad.daemon.process.doing import doing
from lorad.daemon.process.users import Caller, User
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs import import_adapter
from lorad.daemon.runs.create import anchored, expanded
from lorad.daemon.runs.import_adapter import Import
from lorad.daemon.runs.preflight import preflight
from lorad.daemon.runs.versions import in_hand
from lorad.daemon.services.gateway import gateway_up
from lorad.daemon.serving.borrow_pool import hold_pool, is_chat, load
from lorad.daemon.serving.keep_up import set_serving
from lorad.errors import LoradError, SpecError
from lorad.protocol.calls import Attestation
from lorad.records.requests import ServeRequest
from lorad.records.versions import Alias, ServedModel
from lorad.spec.kept import Eval
from lorad.spec.model import Model, Spec
from lorad.spec.text import key_of_override, override
from lorad.store import aliases, runs

_CONTEXT = 8192  # tokens of a prompt and its completion that servers have room for, as far as the base goes
_LENGTHS = {"data.max_prompt_tokens", "rollout.max_new_tokens"}
_OF_A_RUN = ("name", "lora", "algorithm", "reward", "eval", "checkpoint")


class _FoundAdapter(NamedTuple):
    """An adapter in a directory, whose weights are only read once it is known to fit."""

    name: str
    source: Path
    outline: Outline


async def serve(ctx: Context, call: Call) -> ServedModel:
    """Serve a base, and adapters of it under aliases.

    Raises SpecError, NotAllowed, Conflict (a name is taken, no device is free), AdapterRefused,
    AttestationFailed, PoolLost.
    """
    body = call.json(ServeRequest)
    spec = await in_thread(ctx, call.caller.uid, _base_spec, body, ctx.user(call.caller.uid))
    refuse_priority(ctx, call.caller, spec)
    if not body.adapters:  # the base stays warm for aliases of the caller's runs on it
        served = [(row, runs.get(ctx.store, row.run)) for row in aliases.aliases(ctx.store)]
        own = [(row, run) for row, run in served if owns(ctx, call.caller, run.owner_uid)]
        of_base = [(row, run) for row, run in own if spec_of(run).model.path == spec.model.path]
        if not of_base:
            hint = "Add --adapter NAME=DIR, or make an alias with `lorad swap NAME RUN@N` first."
            problem = f"there is nothing to serve on {spec.model.path}: no alias means a version of it"
            raise SpecError(problem, hint=hint)
        async with hold_pool(ctx, of_base[0][1]) as pool:
            set_serving(ctx, [run.name for _, run in of_base], pool)
        return await _answer(ctx, call.caller, pool, [row for row, _ in of_base])
    names = [adapter.name for adapter in body.adapters]
    async with contextlib.AsyncExitStack() as stack:
        for name in sorted({*names}):
            await stack.enter_async_context(ctx.serving.moving[name])
        _refuse(ctx, call.caller, names, spec)
        imports = await _prepare_imports(ctx, call.caller.uid, body, spec)
        for adapter in imports:
            stack.callback(discard, adapter.staged)
            stack.enter_context(in_hand(ctx, adapter.version()))
        loaded = list[tuple[Pool, Attestation]]()
        for adapter in imports:  # their pools stay up until the stack is left
            pool = await stack.enter_async_context(hold_pool(ctx, adapter.row()))
            with _naming_adapter(adapter.name, adapter.source):
                loaded.append((pool, await load(ctx, pool, adapter.version(), keep=True)))
        _refuse(ctx, call.caller, names, spec)
        rows = list[Alias]()
        for adapter, (pool, attestation) in zip(imports, loaded, strict=True):  # without an await
            version = import_adapter.settle(ctx, adapter, attestation, call.caller, pool)
            set_serving(ctx, [adapter.name], pool)
            rows.append(move(ctx, adapter.name, version, by=call.caller))
            publish_move(ctx, adapter.name)
    return await _answer(ctx, call.caller, loaded[0][0], rows)


def _base_spec(body: ServeRequest, user: User | None) -> Spec:
    """Make the spec of the pool that serves. Raises SpecError for keys that only training has."""
    for text in body.overrides:
        if (key := key_of_override(text)).partition(".")[0] in _OF_A_RUN:
            hint = "Serving takes keys of rollout, pool, resources and model, "
            hint += "trainer.backend and data.chat_template."
            raise SpecError(f"override {text}: {key} is for runs that train", hint=hint)
    spec = override(Spec(model=Model(path=body.model), eval=Eval(every=0)), body.overrides)
    return anchored(spec, Path(body.cwd), user)


def _refuse(ctx: Context, caller: Caller, names: Sequence[str], spec: Spec) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise SpecError(f"--adapter {name}: the name is given twice", hint="Give each adapter its own.")
        if runs.exists(ctx.store, name):
            must_own_name(ctx, caller, name, of_run(ctx, caller, runs.get(ctx.store, name)))
        if alias := aliases.find(ctx.store, name):
            must_own_name(ctx, caller, name, of_alias(alias))
        import_adapter.refuse_taken(ctx, name, spec.model.path)


async def _prepare_imports(ctx: Context, uid: int, body: ServeRequest, spec: Spec) -> list[Import]:
    """Check every adapter against the base and stage it, the largest rank first: servers start for it."""
    adapters = list[_FoundAdapter]()
    for adapter in body.adapters:
        source = Path(body.cwd) / expanded(adapter.directory, ctx.user(uid))
        with _naming_adapter(adapter.name, source):
            adapters.append(_FoundAdapter(adapter.name, source, await on_behalf(ctx, uid, outline, source)))
    adapters.sort(key=lambda outlined: -outlined.outline.config.max_rank)
    largest = replace(spec, lora=replace(spec.lora, rank=adapters[0].outline.config.max_rank))
    has_lengths = bool(_LENGTHS & {key_of_override(text) for text in body.overrides})
    if not has_lengths:  # the base's longest context is known once it was checked
        largest = replace(largest, rollout=replace(spec.rollout, max_new_tokens=1))
    facts = await preflight(ctx, largest, body.cwd, uid)
    if not has_lengths:  # the context that users expect of a server; runs of the same base join it with less
        longest = min(_CONTEXT, facts.max_positions)
        data = replace(spec.data, max_prompt_tokens=longest - longest // 4)
        spec = replace(spec, data=data, rollout=replace(spec.rollout, max_new_tokens=longest // 4))
    model = facts.model_path, facts.model_dtype, facts.parameters
    await refresh(ctx)
    imports: list[Import] = []
    try:
        for place, (name, source, shape) in enumerate(adapters, 1):
            doing().tell(f"reading adapter {place} of {len(adapters)}")
            own = replace(spec, name=name)
            arguments = source, shape, own, Path(facts.model_path)
            with _naming_adapter(name, source):
                adapter_read, own = await on_behalf(ctx, uid, import_adapter.read, *arguments)
            size = sum(tensor.size for tensor in adapter_read.tensors.values())
            own_facts = replace(facts, modules=[*adapter_read.config.modules], adapter_parameters=size)
            request = Request(body.cwd, str(source), body.overrides, *model, own_facts)
            imports.append(await import_adapter.stage(ctx, uid, own, request, adapter_read))
    except BaseException:
        for staged_before in imports:
            discard(staged_before.staged)
        raise
    return imports


@contextlib.contextmanager
def _naming_adapter(name: str, source: Path) -> Iterator[None]:
    """Name the adapter in what is raised within the block."""
    try:
        yield
    except LoradError as error:
        raise type(error)(f"adapter {name} of {source}: {error.message}", hint=error.hint) from error
    except OSError as error:
        hint = "It is opened as the user who asks."
        raise SpecError(f"adapter {name} of {source}: {error.strerror or error}", hint=hint) from error


async def _answer(ctx: Context, caller: Caller, pool: Pool, rows: list[Alias]) -> ServedModel:
    """Answer once the gateway serves."""
    chat = await is_chat(ctx, runs.get(ctx.store, rows[0].run))
    return ServedModel(pool.id, rows, chat=chat, **await gateway_up(ctx, caller))
