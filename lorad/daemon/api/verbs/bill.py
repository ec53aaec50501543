"""Answer who used how much of the box."""

from lorad.client.box_shapes import Bill
from lorad.daemon.api.call import Call
from lorad.daemon.bill.answer import KEYS, bill_of
from lorad.daemon.bill.take_in import take_in_all
from lorad.daemon.context import Context
from lorad.errors import SpecError


async def show_bill(ctx: Context, call: Call) -> Bill:
    """Add up what was used, with what pools wrote up to now. Raises SpecError."""
    by = next((key for key in KEYS if key == (call.text("by") or "run")), None)
    if by is None:
        raise SpecError(f"a bill by {call.text('by')}", hint=f"It is by one of: {', '.join(KEYS)}.")
    since, until = (call.number(key, -1) for key in ("since", "until"))
    await take_in_all(ctx)
    return await bill_of(
        ctx,
        call.caller,
        by,
        user=call.text("user"),
        since=None if since < 0 else since,
        until=None if until < 0 else until,
    )
