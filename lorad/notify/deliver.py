"""Tries once to deliver a message, and checks receivers before a run starts.

Ways to deliver are imported late: aiohttp and asyncio were two fifths of the start of a preflight.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lorad.box.private import read_key
from lorad.errors import SpecError
from lorad.files import expanded, whole
from lorad.notify.table import Delivery, Undelivered
from lorad.spec.notify import Notify, is_address

_MOST = 16  # receivers of a run


async def deliver(delivery: Delivery) -> None:
    """Try once to deliver. Raises Undelivered."""
    to = delivery.to
    try:
        if to.form == "apprise":
            from lorad.notify.services import send

            await send(to, delivery.message)
        elif to.command is None:
            from lorad.notify.webhook import post

            await post(to, delivery.message)
        else:
            from lorad.notify.command import run_command

            try:
                program = _program_of(to.command[0], Path(delivery.cwd))
                await run_command([program, *to.command[1:]], delivery.message, delivery.cwd, to.timeout)
            except OSError as error:
                raise Undelivered(f"it cannot be started: {error.strerror}") from None
    except SpecError as error:
        raise Undelivered(error.message) from None


def refuse_unfit(receivers: Sequence[Notify], cwd: Path) -> None:
    """Raise SpecError, by key, for a program that is missing from `cwd`, or a file that others may read."""
    if len(receivers) > _MOST:
        raise SpecError(f"it names more than {_MOST} receivers", key="notify", hint="Name fewer.")
    for number, to in enumerate(receivers):
        try:
            if to.command is not None:
                _program_of(to.command[0], cwd)
            for path in filter(None, (to.token_file, to.url_file)):
                whole(path)
            if to.token_file is not None:
                read_key(to.token_file)
            if to.form == "apprise":
                from lorad.notify.services import service_of

                service_of(to)
            elif to.url_file is not None and not is_address(read_key(to.url_file)):
                raise SpecError(
                    f"{to.url_file} holds no http:// or https:// address", hint="It holds the address alone."
                )
        except SpecError as error:
            raise SpecError(error.problem, key=f"notify[{number}]", hint=error.hint) from None


def _program_of(name: str, cwd: Path) -> str:
    """Find a program by its path, from `cwd` where that is relative, or by its name. Raises SpecError."""
    if "/" not in name:
        if program := shutil.which(name):
            return program
        raise SpecError(f"there is no program {name}", hint="Give its absolute path.")
    path = cwd / expanded(name)
    if not path.is_file():
        raise SpecError(
            f"{path} is no file", hint="Name a program, its arguments as further words of the list."
        )
    if not os.access(path, os.X_OK):
        raise SpecError(f"{path} cannot be executed", hint=f"chmod +x {path}, or name its interpreter first.")
    return str(path)
