"""The parts of grants that are alike: the connection to the pool, and the memory of GPUs."""

import asyncio

import msgspec

from lorad.protocol.nodes import GrantedNode, GrantLine, GrantRequest
from lorad.text import size as in_units

LARGER = "Ask for more devices, keep such nodes out (cluster.nodes, cluster.labels), or train less."


def too_small(node: GrantedNode, needed: int) -> str:
    """Say which GPU of a node has the least memory, where that is less than needed, in bytes; "" else."""
    least, device = min(zip(node.memory, node.devices, strict=False), default=(needed, ""))
    if least >= needed:
        return ""
    return f"{node.node}: GPU {device} has {in_units(least)}, and the pool needs {in_units(needed)} of each"


class Pool:
    """The connection to the pool, whose end is the end of the grant."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._said: GrantLine | None = None

    @classmethod
    async def connect(cls, request: GrantRequest) -> "Pool":
        return cls(*await asyncio.open_unix_connection(request.socket))

    async def say(self, line: GrantLine) -> None:
        """Say something, unless it is what was said last."""
        if line != self._said:
            self._said = line
            self._writer.write(msgspec.json.encode(line) + b"\n")
            await self._writer.drain()

    async def gone(self) -> None:
        """Wait until the pool ends; it says nothing."""
        while await self._reader.read(4096):
            pass
