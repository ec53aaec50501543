"""What a run asks of its critic: `values` and `value_backward`."""

from lorad.pool.state import Pool
from lorad.protocol import calls
from lorad.protocol.batch import LossStats


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
