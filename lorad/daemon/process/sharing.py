"""Who uses the daemon, and how it acts for them: one user alone, or every user of the machine.

What differs between the two stands here, and the rest of the daemon asks without knowing which kind it is.
Where only a shared daemon has something to do, it asks `shared`.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from lorad.box.config import Sharing
from lorad.box.paths import Home
from lorad.daemon.process.user_threads import Hands, UserTurns
from lorad.daemon.process.users import Caller, User, user_of
from lorad.errors import NotAllowed

T = TypeVar("T")


class Users:
    """The users of a daemon, and what is under way for each of them.

    In this class it is one user, who may do everything and whose files and processes are the daemon's own.

    shared: several users share this daemon; each owner of what is served has a gateway of their own.
    socket_mode: the mode of the socket on which it answers.
    hands: threads in which a shared daemon does the work of requests.
    polls: threads for short questions to pools, which do not wait behind long ones.
    checks: checks of specs.
    asks: requests for completions, each of which has a process.
    """

    shared: ClassVar[bool] = False
    socket_mode: ClassVar[int] = 0o600

    def __init__(self) -> None:
        self.hands = Hands()
        self.polls = Hands()
        self.checks = UserTurns("checks of specs", at_once=4, most=32)
        self.asks = UserTurns("requests for completions", at_once=8, most=64)

    def user(self, uid: int, allowed: Sequence[str] = ()) -> User | None:
        """Find the user who is to own what is made for `uid`; None: the daemon's own user.

        allowed: further variables of the daemon that the user's processes inherit.
        """
        return None

    async def in_thread(self, uid: int, work: Callable[[], T]) -> T:
        """Run `work`, which may wait for a process or file of the user's, where it blocks no other user.

        Raises what it raises, and Conflict for a user who has too much under way.
        """
        return await asyncio.to_thread(work)

    def refuse_stranger(self, uid: int) -> None:
        """Raises NotAllowed for a user who may not connect at all."""
        if uid not in (0, os.getuid()):
            hint = "Use a LORAD_HOME of your own; every user has a daemon of their own."
            raise NotAllowed(f"this daemon belongs to uid {os.getuid()}, you are uid {uid}", hint=hint)

    def is_admin(self, caller: Caller, sharing: Sharing) -> bool:
        """Check whether the caller may do everything."""
        return True

    def is_believed(self, uid: int, owner_uid: int) -> bool:
        """Check whether a process of `uid` is believed about what belongs to `owner_uid`."""
        return True

    def pool_socket(self, home: Home, pool_id: str) -> Path:
        """Name the socket of a pool, which the pool's user makes."""
        return home.pool_socket(pool_id)


class SharedBox(Users):
    """A daemon for every user of the machine: it acts for each of them with no more rights than they have."""

    shared = True
    socket_mode = 0o666

    def user(self, uid: int, allowed: Sequence[str] = ()) -> User | None:
        return user_of(uid, allowed)

    async def in_thread(self, uid: int, work: Callable[[], T]) -> T:
        return await self.hands.do(uid, work)

    def refuse_stranger(self, uid: int) -> None:
        """Refuse nobody: each request names the access that it needs."""

    def is_admin(self, caller: Caller, sharing: Sharing) -> bool:
        return caller.uid in (0, os.geteuid()) or caller.name in sharing.admins

    def is_believed(self, uid: int, owner_uid: int) -> bool:
        return uid == owner_uid

    def pool_socket(self, home: Home, pool_id: str) -> Path:
        return home.pool(pool_id) / "work" / "pool.sock"
