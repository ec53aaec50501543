"""What a run asks of its slot and its critic: passes, steps, log-probabilities, values, checkpoints."""

import asyncio
from pathlib import Path

from msgspec.structs import replace
from safetensors import SafetensorError

from lorad.errors import StorageError
from lorad.pool.state import Pool
from lorad.protocol import calls
from lorad.protocol.batch import Gradients, LossStats
from lorad.protocol.calls import CRITIC
from lorad.trainers.base import Policy


async def forward_backward(pool: Pool, call: calls.Call, args: calls.ForwardBackward) -> Gradients:
    slot = pool.tenant(call).run
    with pool.parties.on_slot(slot):
        async with pool.phases.training(call.run):
            with pool.work.measured(slot, args.batch):
                stats = await pool.joint.forward_backward(replace(args, slot=slot))
    pool.meter.trained(int(args.batch.targets.size))
    pool.ledger.add(trained=int(args.batch.targets.size))
    return stats


async def values(pool: Pool, call: calls.Call, args: calls.Values) -> calls.ValuesResult:
    tenant = pool.tenant(call)
    with pool.parties.on_slot(tenant.run):
        async with pool.phases.training(call.run):
            return calls.ValuesResult(await pool.trainer.values(tenant.critic, args.batch))


async def value_backward(pool: Pool, call: calls.Call, args: calls.ValueBackward) -> LossStats:
    tenant = pool.tenant(call)
    with pool.parties.on_slot(tenant.run):
        async with pool.phases.training(call.run):
            with pool.work.measured(tenant.critic, args.batch):
                stats = await pool.trainer.value_backward(
                    tenant.critic, args.batch, args.targets, args.loss, args.normaliser
                )
    pool.meter.trained(int(args.batch.targets.size))
    pool.ledger.add(trained=int(args.batch.targets.size))
    return stats


async def optim_step(pool: Pool, call: calls.Call, args: calls.OptimStep) -> calls.Stepped:
    tenant = pool.tenant(call)
    slot = tenant.critic if args.of == "critic" else tenant.run
    with pool.parties.on_slot(tenant.run):
        async with pool.phases.training(call.run):
            result = await pool.trainer.optim_step(slot, args.lr, args.max_grad_norm, args.optimizer)
    recomputes = bool(tenant.spec.activation_checkpointing and not tenant.spec.kept_tokens)
    done, mfu = pool.work.take(slot, recomputes=recomputes)
    memory, peak = await pool.work.take_memory()
    waited = pool.parties.take(tenant.run)
    machine = pool.machine.take(slot)
    return calls.Stepped(
        result.grad_norm, result.applied, done.tokens, done.seconds, mfu, memory, peak, waited, machine
    )


async def discard_grads(pool: Pool, call: calls.Call, _: calls.Nothing) -> calls.Nothing:
    await pool.trainer.discard_grads(pool.tenant(call).run)
    return calls.Nothing()


async def logprobs(pool: Pool, call: calls.Call, args: calls.Logprobs) -> calls.LogprobsResult:
    """Return the log-probabilities of a policy. Raises Conflict for one that the slot was opened without."""
    tenant = pool.tenant(call)
    trainer = pool.trainer
    policy = Policy()
    match args.of:
        case "slot":
            policy = Policy(tenant.run)
        case "reference":
            trainer = pool.holder_of_reference(tenant.spec)
            policy = Policy(tenant.reference)
        case "teacher":
            trainer = pool.teacher
            policy = Policy(tenant.reference if tenant.spec.reference else None)
    with pool.parties.on_slot(tenant.run):
        async with pool.phases.training(call.run):
            predicted = await trainer.predictions(policy, args.batch, args.temperature)
    return calls.LogprobsResult(predicted.logprobs, predicted.correct)


async def save(pool: Pool, call: calls.Call, args: calls.Save) -> calls.Saved:
    """Write a checkpoint of the slot. Raises StorageError, also for a version that was not written."""
    tenant = pool.tenant(call)
    try:
        files = await pool.trainer.save(tenant.run, Path(args.directory))
        if tenant.spec.critic is not None:
            critic = Path(args.directory) / CRITIC
            await asyncio.to_thread(critic.mkdir)
            files += [f"{CRITIC}/{name}" for name in await pool.trainer.save(tenant.critic, critic)]
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{args.directory} could not be written: {error}",
            hint="Free some space (`lorad rm` deletes a run), then resume.",
        ) from error
    await pool.files.flush(tenant.run)
    pool.ledger.saved(tenant.run, args.step)
    return calls.Saved(files)
