"""A run joins and leaves: `open` and `close`."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from lorad.adapters.adapter import AdapterConfig
from lorad.adapters.directory import verify
from lorad.adapters.peft import outline
from lorad.errors import AttestationFailed, Conflict
from lorad.models.turns import caller
from lorad.pool.microbatches import choose_sizes
from lorad.pool.state import Pool
from lorad.pool.tenants import Tenant, critic_slot, reference_slot
from lorad.pool.verbs.versions import attest_reference
from lorad.protocol import calls
from lorad.protocol.heartbeat import HEART
from lorad.trainers.base import SlotInfo, SlotSpec

_OUTPUT = "lm_head"  # what a critic does without


async def open_slot(pool: Pool, call: calls.Call, args: calls.Open) -> calls.Opened:
    """Open a slot afresh, whatever an older attempt left. Raises Conflict when this attempt has a slot."""
    with HEART.tells(f"opening the slot of {call.run}"):  # the first one compares engine and trainer
        tenant = pool.tenants.get(call.run)
        if tenant is not None and tenant.attempt == call.attempt:
            raise Conflict(f"{call.run} attempt {call.attempt} has an open slot", hint="Close it first.")
        if tenant is not None:
            await pool.trainer.discard_grads(call.run)
            await pool.evict(tenant)
        await pool.files.forget(call.run)
        args = choose_sizes(args, pool.room)
        pool.parties.joins(call.run, args.priority)
        pool.ledger.opens(call.run, args.step)
        pool.machine.opens(call.run)
        if args.resume_from is not None:
            await asyncio.to_thread(verify, Path(args.resume_from))
        canaries = await pool.attester.canaries(args.canaries, args.canary_tokens, call.run)
        reference = None if args.reference is None else await _attested(pool, args, args.reference)
        async with pool.phases.with_base(call.run):
            slot = await _slot(pool, call.run, args)
            opened = [slot.slot]  # in the end all slots of the run are, or none
            try:
                if (critic := args.critic) is not None:
                    modules = tuple(module for module in args.modules if module != _OUTPUT)
                    own = replace(
                        args,
                        modules=modules,
                        rank=critic.rank,
                        alpha=critic.alpha,
                        source=None,
                        resume_from=critic.resume_from,
                        expert_rank=critic.expert_rank,
                    )
                    beside = await _slot(pool, critic_slot(call.run), own, critic=True)
                    opened.append(critic_slot(call.run))
                    slot = replace(slot, bytes=slot.bytes + beside.bytes)
                if args.reference is not None:
                    beside = await _hold_reference(pool, call.run, args, args.reference)
                    slot = replace(slot, bytes=slot.bytes + beside.bytes)
            except BaseException:
                for name in opened:
                    await pool.trainer.close(name)
                raise
        pool.tenants[call.run] = Tenant(call.run, call.attempt, args, slot, canaries)
        pool.ledger.holds(caller().payer, slot.bytes)
        return calls.Opened(
            slot.parameters,
            slot.tensors,
            slot.bytes,
            reference,
            args.tokens_per_microbatch,
            bool(args.activation_checkpointing),
            args.kept_tokens,
        )


async def close_slot(pool: Pool, call: calls.Call, _: calls.Nothing) -> calls.SlotClosed:
    """Close a slot, which is gone even when this raises what went wrong with the files of a version."""
    await pool.evict(pool.tenant(call))
    async with pool.phases.with_base(call.run):
        checksum = await pool.trainer.base_checksum()
    pool.parties.leaves(call.run)
    try:
        await pool.files.flush(call.run)
    finally:
        await pool.files.forget(call.run)
    return calls.SlotClosed(checksum)


async def evict_slot(pool: Pool, _: calls.Call, args: calls.Evict) -> calls.Nothing:
    """Free the slot of an attempt after its calls under way have ended."""
    await pool.fence(args.run).settle()
    tenant = pool.tenants.get(args.run)
    if tenant is not None and tenant.attempt == args.attempt:
        await pool.evict(tenant)
        pool.parties.leaves(args.run)
        await pool.files.forget(args.run)
    return calls.Nothing()


async def _attested(pool: Pool, args: calls.Open, reference: calls.LoadVersion) -> calls.Attestation:
    """Attest a reference in the engine, too, where that has room for it, though it never has to serve one."""
    if args.has_teacher:
        return calls.Attestation(
            "inconclusive", "no engine has the teacher's model; its trainer holds its bytes"
        )
    config = (await asyncio.to_thread(outline, Path(reference.directory))).config
    if config.max_rank > _config(args).max_rank or not set(config.modules) <= set(args.modules):
        return calls.Attestation(
            "inconclusive", "the engine has no room for its rank or modules; the trainer holds its bytes"
        )
    return await attest_reference(pool, reference)


async def _hold_reference(pool: Pool, run: str, args: calls.Open, reference: calls.LoadVersion) -> SlotInfo:
    """Open the frozen slot of a run's reference. Raises AdapterRefused, AttestationFailed for other bytes."""
    name = reference_slot(run)
    directory = Path(reference.directory)
    config = replace((await asyncio.to_thread(outline, directory)).config, dropout=args.dropout)
    spec = SlotSpec(config, source=directory, tokens_per_microbatch=args.tokens_per_microbatch, frozen=True)
    trainer = pool.holder_of_reference(args)
    info = await trainer.open(name, spec)
    try:
        digest = await asyncio.to_thread((await trainer.export(name)).digest)
        if digest != reference.sha256:
            raise AttestationFailed(
                f"the trainer holds sha256 {digest} as the reference of {run}, not {reference.sha256}",
                hint=f"{directory} was changed, or the trainer does not keep what it reads. Restore it, "
                "then resume.",
            )
    except BaseException:
        await trainer.close(name)
        raise
    return info


async def set_reference(pool: Pool, call: calls.Call, args: calls.LoadVersion) -> calls.Nothing:
    """Replace the reference by a version of the run, once its files are on disk."""
    tenant = pool.tenant(call)
    await pool.files.flush(tenant.run)
    async with pool.phases.with_base(call.run):
        if tenant.spec.reference is not None:
            await pool.trainer.close(tenant.reference)
            tenant.spec = replace(tenant.spec, reference=None)
        await _hold_reference(pool, tenant.run, tenant.spec, args)
        tenant.spec = replace(tenant.spec, reference=args)
    return calls.Nothing()


def _config(args: calls.Open) -> AdapterConfig:
    modules = tuple(sorted(args.modules))
    return AdapterConfig(
        args.rank, args.alpha, modules, args.rslora, args.dropout, args.expert_rank, args.dora
    )


async def _slot(pool: Pool, name: str, args: calls.Open, *, critic: bool = False) -> SlotInfo:
    resumed = args.resume_from is not None
    info = await pool.trainer.open(
        name,
        SlotSpec(
            adapter=_config(args),
            optimizer=args.optimizer,
            lora_type=args.lora_type,
            init=args.init,
            seed=args.seed,
            source=Path(args.source) if args.source is not None and not resumed else None,
            tokens_per_microbatch=args.tokens_per_microbatch,
            activation_checkpointing=bool(args.activation_checkpointing),
            kept_tokens=args.kept_tokens,
            lent_tokens=args.lent_tokens,
            critic=critic,
        ),
    )
    if args.resume_from is not None:
        try:
            await pool.trainer.load(name, Path(args.resume_from))
        except BaseException:
            await pool.trainer.close(name)
            raise
    return info
