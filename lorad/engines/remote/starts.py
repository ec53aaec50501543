"""How servers of lorad's own are started: on this machine, or on nodes, where a tunnel leads to each."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

import lorad
from lorad.box.paths import private_directory
from lorad.children.host import Host, Process
from lorad.children.process import Child
from lorad.engines.remote.dialect import Dialect, ServerSettings
from lorad.engines.remote.settings import local_settings, node_settings
from lorad.protocol.pool_setup import ServerSetup

_PACKAGE = Path(lorad.__file__).parent
_SOCKET = "server.sock"


class Directories(NamedTuple):
    """The directories `work` and `logs` that `RemoteEngine.open` describes."""

    work: Path
    logs: Path


class Starts:
    """Starts the servers of lorad's own, each by its index; `RemoteEngine.open` describes `hosts`."""

    def __init__(
        self,
        dialect: Dialect,
        settings: ServerSettings,
        setup: ServerSetup,
        places: Directories,
        hosts: Sequence[Host],
    ) -> None:
        self._dialect = dialect
        self._settings = settings
        self._setup = setup
        self._records, self._logs = places
        self._hosts = list(hosts)
        self.private = private_directory(places.work)

    def host(self, index: int) -> Host | None:
        """Return the first node of a server: each node has the same number of servers, or one more."""
        return self._hosts[self._node_of(index)] if self._hosts else None

    def socket(self, index: int) -> Path:
        """Return the server's socket, or the near end of its tunnel."""
        return self.private / f"{index}.sock"

    def record(self, index: int) -> Path:
        return self._records / f"{_name(index)}.json"

    def child(self, index: int, host: Host | None) -> Process:
        """Make the process of a server's next life; on a node, its directory is new for each life."""
        name = _name(index)
        log = self._logs / f"{name}.log"
        if host is None:
            socket = self.socket(index)
            temporary = self.private / f"tmp{index}"
            socket.unlink(missing_ok=True)  # of a life that was killed: it would be in use for ever
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700)
            settings = local_settings(self._settings, index)
        else:
            socket = host.directory / name / _SOCKET
            temporary = host.directory / name / "tmp"
            first = next(other for other in range(index + 1) if self._node_of(other) == self._node_of(index))
            settings = node_settings(self._settings, index - first, host.name, host.devices)
        argv = self._dialect.command(self._setup.python, settings, socket)
        environment = {**self._dialect.environment(settings), "TMPDIR": str(temporary), **self._setup.env}
        if host is None:
            return Child(argv, environment, log, self.record(index), self.private)
        for number, path in enumerate(map(Path, argv)):
            if path.suffix == ".py" and path.is_relative_to(_PACKAGE):  # a program of lorad's own
                argv[number] = str(host.directory / "python" / "lorad" / path.relative_to(_PACKAGE))
        return host.child(name, argv, environment, log=log, files={})

    def tunnel(self, index: int, host: Host) -> AbstractAsyncContextManager[None]:
        """Lead to a server's socket on a node, also when it has started again."""
        return host.outward(f"{_name(index)}/{_SOCKET}", self.socket(index))

    def _node_of(self, index: int) -> int:
        return index * len(self._hosts) // self._setup.servers


def _name(index: int) -> str:
    """Name a server's directory on a node, and its files."""
    return f"engine-{index}"
