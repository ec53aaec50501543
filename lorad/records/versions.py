"""A version of an adapter, a checkpoint, an alias, and what serves them."""

from msgspec import Struct

from lorad.protocol.traffic import Figures
from lorad.records.measured import Result


class Version(Struct, frozen=True):
    run: str
    version: int
    step: int = 0
    sha256: str = ""
    path: str | None = None  # None while, or after, there are no files
    rank: int = 0
    alpha: float = 0.0
    parent: int | None = None
    created_at: float = 0.0
    pinned: bool = False
    aliases: list[str] = []
    attested: str = ""
    attestation: str = ""
    bytes: int = 0
    loaded: bool = False
    results: list[Result] = []


class Checkpoint(Struct, frozen=True):
    run: str
    step: int
    attempt: int = 0
    version: int = 0
    path: str = ""
    bytes: int = 0
    created_at: float = 0.0


class Exported(Struct, frozen=True):
    version: str  # run@number
    path: str
    sha256: str = ""  # of the adapter
    url: str = ""  # of the upload, where the command made one


class Alias(Struct, frozen=True):
    alias: str
    run: str
    version: int
    updated_at: float = 0.0
    owner_uid: int = -1  # who made it
    sha256: str = ""
    attested: str = ""
    by: str | None = None  # who moved it last

    @property
    def serves(self) -> str:
        """Return the name of the version."""
        return f"{self.run}@{self.version}"


class ServedAlias(Alias, frozen=True):
    owner: str = ""  # owner of the alias
    step: int | None = None  # the step that made the version
    traffic: Figures | None = None  # None while no gateway is up
    previous: str | None = None  # run@version that a rollback leads to
    loaded: bool | None = None  # by the pool's last status; else the next request loads it


class Verdict(Struct, frozen=True):
    verdict: str
    detail: str = ""


class Swapped(Alias, frozen=True):
    previous: str | None = None  # run@version
    attestation: Verdict = Verdict("unknown")
    seconds: float = 0.0
    gateway: str | None = None  # its socket; None where it does not come up
    url: str | None = None
    key_file: str | None = None  # that holds the key for `url`
    chat: bool = False  # it expects the chat template


class AliasMove(Struct, frozen=True):
    """A move of an alias."""

    alias: str
    run: str | None = None
    version: int | None = None  # None: the alias was removed
    at: float = 0.0
    by: str = ""


class RemovedAlias(Struct, frozen=True):
    alias: str
    removed: bool = True


class ServedModel(Struct, frozen=True):
    pool: str
    aliases: list[Alias] = []
    gateway: str | None = None
    url: str | None = None
    key_file: str | None = None  # that holds the key for `url`
    chat: bool = False  # it expects the chat template


class StoppedServing(Struct, frozen=True):
    model: str
    runs: list[str] = []


class LoadedModel(Struct, frozen=True):
    """What a gateway needs to serve a model, which is loaded."""

    model: str
    run: str
    version: int
    sha256: str
    socket: str
    model_path: str
    chat_template: bool


class Completion(Struct, frozen=True):
    text: str
    tokens: list[int] = []
    finish: str | None = None


class Completions(Struct, frozen=True):
    version: str
    completions: list[Completion] = []


class ServingOwner(Struct, frozen=True):
    """Whose gateway answers with a version."""

    version: str  # run@number
    owner_uid: int


class DoorOwner(Struct, frozen=True):
    """Whose a Tinker door is."""

    owner_uid: int
