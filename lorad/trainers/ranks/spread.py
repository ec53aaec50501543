"""The ranks of one trainer on several machines: the same number on each, in the order of the machines.

Only this machine writes the directories of runs: what ranks read is put on each machine first, and what rank
0 writes is fetched from its machine.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from lorad.children.host import Host, Team, check_weights, put_on_all
from lorad.errors import SpecError
from lorad.models.facts import weights_sha256
from lorad.protocol.pool_setup import RanksSetup
from lorad.trainers.ranks.config import RanksConfig, TrainerDirectories, environment_of, meeting_file

_NAME = "trainer"  # of the directory that ranks work in, on each machine
_SOCKET = "trainer.sock"
_TP = "Ranks that share a layer must be on one node: choose a tp that divides the devices of a node."
_FOLLOWED = ("rank-*.heartbeat", "refusal.json")


class Spread:
    """Raises SpecError when ranks and machines do not fit."""

    def __init__(self, hosts: Sequence[Host], setup: RanksSetup) -> None:
        self._hosts = hosts
        self._env = setup.env
        self._python = setup.python
        ranks = setup.ranks
        self._per_node = ranks // len(hosts)
        self._names = itertools.count(1)
        self._stack = AsyncExitStack()
        if self._per_node * len(hosts) != ranks:
            raise SpecError(
                f"tp x pp x cp x dp is {ranks} ranks, which {len(hosts)} nodes cannot share equally",
                key="resources.nodes",
                hint="Make trainer.dp a multiple of it.",
            )
        if self._per_node % setup.tp:
            raise SpecError(
                f"tp is {setup.tp}, but there are {self._per_node} ranks on a node",
                key="trainer.tp",
                hint=_TP,
            )
        for host in hosts:
            if host.devices and len(host.devices) < self._per_node:
                raise SpecError(
                    f"{self._per_node} ranks on {host.name}, which gave {len(host.devices)} devices",
                    key="resources.devices",
                )

    def team(self, config: RanksConfig, places: TrainerDirectories) -> Team:
        """Make the launchers of all machines; files of ranks in `_FOLLOWED` appear in `places.private`."""
        launchers = []
        for place, host in enumerate(self._hosts):
            work = host.directory / _NAME
            python = host.directory / "python"
            own = msgspec.structs.replace(
                config,
                python=self._python or host.python,
                first=place * self._per_node,
                here=self._per_node,
                devices=tuple(
                    f"cuda:{rank % self._per_node}" if host.devices else "cpu" for rank in range(config.ranks)
                ),
                socket=str(host.directory / _SOCKET),
                meeting=f"tcp://{self._hosts[0].address}",
            )
            network = {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
            environment = environment_of(
                {**{name: value for name, value in network.items() if value}, **self._env},
                host.devices[: self._per_node],
                config.threads,
                python=python,
                temporary=work / "tmp",
            )
            launch = python / "lorad" / "trainers" / "ranks" / "launch.py"
            launchers.append(
                host.child(
                    _NAME,
                    [host.python, "-I", "-S", str(launch), str(work / places.config.name)],
                    environment,
                    log=places.log,
                    files={places.config.name: msgspec.json.encode(own).decode()},
                    follow=_FOLLOWED,
                    shadows=places.private,
                )
            )
        return Team(launchers)

    async def open(self, model: Path, places: TrainerDirectories) -> None:
        """Have rank 0 find the pool's socket; see `check_weights`."""
        await check_weights(self._hosts, model, await asyncio.to_thread(weights_sha256, model))
        await self._stack.enter_async_context(self._hosts[0].inward(_SOCKET, places.socket))

    async def close(self) -> None:
        await self._stack.aclose()

    async def meet(self, port: int) -> None:
        """Tell all ranks where rank 0 listens."""
        name = meeting_file(Path(_NAME) / "config.json")
        text = f"{self._hosts[0].address}:{port}"
        await asyncio.gather(*(host.write(str(name), text) for host in self._hosts))

    @asynccontextmanager
    async def put(self, directory: Path) -> AsyncIterator[Path]:
        """Copy a directory's files to all machines, and yield the path by which ranks read them."""
        name = f"in-{next(self._names)}"
        try:
            failed = await put_on_all(self._hosts, f"{_NAME}/{name}", directory)
            for error in filter(None, failed):
                raise error
            yield Path(name)
        finally:
            await self._remove(name, self._hosts)

    @asynccontextmanager
    async def fetched(self, directory: Path) -> AsyncIterator[Path]:
        """Yield a path for rank 0 to write files to, which are then fetched into `directory`."""
        name = f"out-{next(self._names)}"
        try:
            await self._hosts[0].make(f"{_NAME}/{name}")
            yield Path(name)
            await self._hosts[0].fetch(f"{_NAME}/{name}", directory)
        finally:
            await self._remove(name, self._hosts[:1])

    async def _remove(self, name: str, hosts: Sequence[Host]) -> None:
        work = (host.remove(f"{_NAME}/{name}") for host in hosts)
        await asyncio.gather(*work, return_exceptions=True)
