"""What a gateway serves under which name: `table.json` in its directory, which the daemon replaces whole."""

from msgspec import Struct

FILE = "table.json"


class Served(Struct, frozen=True):
    """A version that is pinned or aliased, and where it is served."""

    run: str
    version: int
    sha256: str
    model_path: str
    socket: str | None  # of a pool that is up and can serve it
    path: str | None = None
    created_at: float = 0.0
    owner_uid: int | None = None  # whose gateway serves it, where a daemon is shared

    @property
    def name(self) -> str:
        return f"{self.run}@{self.version}"


class Names(Struct, frozen=True):
    aliases: dict[str, str] = {}  # alias -> run@number, a key of `versions`
    versions: dict[str, Served] = {}
