"""What a pool does for each verb of `lorad/protocol/calls.py`.

A plain verb is `(pool, call, args) -> result`. A stream is an async generator of its items with the result as
the last.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from lorad.pool.state import Pool
from lorad.pool.verbs import about, generate, open_close, train, versions
from lorad.protocol.calls import Call

_Plain = Callable[[Pool, Call, Any], Awaitable[Any]]
_Stream = Callable[[Pool, Call, Any], AsyncGenerator[Any, None]]

PLAIN: dict[str, _Plain] = {
    "open": open_close.open_slot,
    "forward_backward": train.forward_backward,
    "optim_step": train.optim_step,
    "discard_grads": train.discard_grads,
    "logprobs": train.logprobs,
    "values": train.values,
    "value_backward": train.value_backward,
    "set_reference": open_close.set_reference,
    "publish": versions.publish,
    "save": train.save,
    "unload": versions.unload,
    "close": open_close.close_slot,
    "evict": open_close.evict_slot,
    "hello": about.hello,
    "status": about.status,
    "shutdown": about.shutdown,
    "write_uses": about.write_uses,
    "load_version": versions.load_version,
    "attest_again": versions.attest_again,
    "let_go": versions.let_go,
    "rank": generate.rank,
}
STREAMS: dict[str, _Stream] = {"generate": generate.generate, "serve": generate.serve}
