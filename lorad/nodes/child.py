"""A child on a node, which looks like one of this machine."""

import asyncio
import contextlib
import fnmatch
from pathlib import Path
from typing import Protocol

from lorad.children.logs import Log
from lorad.errors import LoradError, PoolLost
from lorad.files import write_whole
from lorad.nodes import messages

_LINE = 1 << 16  # characters of a line in the log; what is longer is cut into several
_PID = 10  # digits


class _Node(Protocol):
    """The part of a `Node` that a child needs."""

    name: str

    async def ask(self, request: messages.Request) -> str: ...

    def register(self, name: str, child: "RemoteChild") -> None: ...


class RemoteChild:
    """A child on another machine, see `Child` and `Host.child`; its log lines begin with the node's name."""

    def __init__(self, node: _Node, asked: messages.Spawn, log: Path, shadows: Path | None) -> None:
        self._node = node
        self._asked = asked
        self._shadows = shadows
        self.pid: int | None = None
        self.output = Log(log)
        self._rest = ""
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start the child; a cancelled start ends it. Raises PoolLost, and what the agent refuses with."""
        self._node.register(self._asked.name, self)
        self.output.path.touch(mode=0o600)
        self.output.began = self.output.size()
        try:
            pid = await self._node.ask(self._asked)
            if not (pid.isascii() and pid.isdecimal() and len(pid) < _PID):
                raise PoolLost(f"{self._node.name} started {self._asked.name}, and told no pid: {pid[:40]!r}")
            self.pid = int(pid)
        except asyncio.CancelledError:
            await self._end_there(grace=0.0)
            raise

    @property
    def is_alive(self) -> bool:
        return self.pid is not None and not self._end.done()

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    async def stop(self, grace: float = 30.0) -> None:
        if self.is_alive:
            await self._end_there(grace)
            await self.ended()

    async def dump(self) -> None:
        with contextlib.suppress(LoradError):
            await self._node.ask(messages.Dump(name=self._asked.name))

    def take(self, news: messages.ChildNews) -> None:
        """Take what the agent says of this child."""
        if isinstance(news, messages.Logged):
            text = self._rest + news.text
            end = text.rfind("\n") + 1
            if len(text) - end > _LINE:
                end = len(text)
            self._rest = text[end:]
            self._append(text[:end])
        elif isinstance(news, messages.Wrote):
            patterns = self._asked.follow
            is_followed = any(fnmatch.fnmatchcase(news.file, pattern) for pattern in patterns)
            if self._shadows is not None and "/" not in news.file and is_followed:
                with contextlib.suppress(OSError):
                    write_whole(self._shadows / news.file, news.text.encode(), durable=False)
        else:
            self.finish(news.how)

    def finish(self, how: str) -> None:
        if not self._end.done():
            self._append(self._rest)
            self._rest = ""
            self._end.set_result(how)

    async def _end_there(self, grace: float) -> None:
        with contextlib.suppress(LoradError):
            await self._node.ask(messages.Stop(name=self._asked.name, grace=grace))

    def _append(self, text: str) -> None:
        lines = [f"{self._node.name}: {line}\n" for line in text.splitlines()]
        with contextlib.suppress(OSError), self.output.path.open("a") as file:
            file.write("".join(lines))
