"""What users write on runs: bodies of requests, and answers."""

from typing import Annotated

from msgspec import Meta, Struct, field

from lorad.client.requests import Body, Name, Overrides
from lorad.spec.numbers import NonNegative, Tag

NOTE_CHARACTERS = 4000
_MANY = Meta(max_length=256)


class LabelRequest(Body, frozen=True):
    add: Annotated[list[Tag], _MANY] = field(default_factory=list)
    remove: Annotated[list[Tag], _MANY] = field(default_factory=list)
    note: Annotated[str, Meta(max_length=NOTE_CHARACTERS)] | None = None  # None: as it is


class EditRequest(Body, frozen=True):
    overrides: Overrides


class RenameRequest(Body, frozen=True):
    name: Name  # the run's new one


class GroupRequest(Body, frozen=True):
    limit: NonNegative | None = None  # None: no limit


class Group(Struct, frozen=True):
    """Runs of one owner with the same `resources.group`."""

    name: str
    owner: str = ""
    limit: int | None = None  # how many may work at a time; None: any number
    working: int = 0
    queued: int = 0
