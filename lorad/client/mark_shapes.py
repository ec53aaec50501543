"""What users write on runs: bodies of requests, and answers."""

from typing import Annotated

from msgspec import Meta, Struct

from lorad.spec.numbers import NonNegative, Tag

NOTE_CHARACTERS = 4000


class LabelRequest(Struct, frozen=True):
    add: list[Tag] = []
    remove: list[Tag] = []
    note: Annotated[str, Meta(max_length=NOTE_CHARACTERS)] | None = None  # None: as it is


class EditRequest(Struct, frozen=True):
    overrides: list[str]  # `key=value`


class RenameRequest(Struct, frozen=True):
    name: str  # the run's new one


class GroupRequest(Struct, frozen=True):
    limit: NonNegative | None = None  # None: no limit


class Group(Struct, frozen=True):
    """Runs of one owner with the same `resources.group`."""

    name: str
    owner: str = ""
    limit: int | None = None  # how many may work at a time; None: any number
    working: int = 0
    queued: int = 0
