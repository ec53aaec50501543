"""Gives a notification to a command, which is started without a shell and ends with all that it started."""

import asyncio
import os
from collections.abc import Sequence

import msgspec

from lorad.children import guard
from lorad.children.ask import under_guard
from lorad.notify.table import Message, Undelivered

_NOT_PASSED = (  # lorad set them for itself
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONIOENCODING",
    "TOKENIZERS_PARALLELISM",
)
_TERM_SECONDS = 3.0  # after SIGTERM: SIGKILL
_NOT_STARTED = 127
_LONGEST = 4000  # characters of a variable


async def run_command(argv: Sequence[str], message: Message, cwd: str, timeout: float) -> None:
    """Run a command with the message on its standard input, for `timeout` seconds at most.

    Raises Undelivered unless it ends with code 0 in time. When this returns or is cancelled, nothing that the
    command started is left.
    """
    where = cwd if os.access(cwd, os.X_OK) else "/"
    env = environment(message)
    async with under_guard(argv, env, is_read=False, cwd=where, grace=_TERM_SECONDS) as process:
        try:
            async with asyncio.timeout(timeout):
                await process.communicate(msgspec.json.encode(message) + b"\n")
        except TimeoutError:
            raise Undelivered(f"it did not end within {timeout:g} s and was killed") from None
    code = process.returncode or 0
    if code == _NOT_STARTED:
        raise Undelivered("it cannot be started, or ended with code 127")
    if number := guard.killed_by(code):
        raise Undelivered(f"it was killed by {number.name}")
    if code:
        raise Undelivered(f"it ended with code {code}")


def environment(message: Message) -> dict[str, str]:
    """Make the environment of a command: this process's own, and the fields of the message."""
    fields = {
        "NOTIFY_ID": message.id,
        "EVENT": message.event,
        "RUN": message.run,
        "TEXT": message.text,
        "STATE": message.state,
        "REASON": message.reason or "",
        "STEP": str(message.step),
        "STEPS": str(message.steps),
        "ALARM": message.alarm.kind if message.alarm else "",
    }
    own = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    return own | {f"LORAD_{name}": value.replace("\0", "")[:_LONGEST] for name, value in fields.items()}
