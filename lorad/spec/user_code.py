"""The time, the memory and the variables that a process of user code may have."""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from lorad.spec.numbers import Part, PositiveFloat

EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
_LEAST_MEMORY = 64 << 20  # bytes


class UserCode(Part, frozen=True):
    """The process in which the functions of `algorithm.loss` and `algorithm.advantage` run.

    Attributes:
        timeout: seconds for one call; the first one of a loss includes the check of its derivative.
        env: variables that user code finds beside those that every program needs; no secret is there unless
            named here.
        memory: limit of each process of user code, in bytes or as in `4GiB`; null is half of the machine's
            memory.
    """

    timeout: PositiveFloat = 60.0
    env: list[EnvName] = msgspec.field(default_factory=list)
    memory: int | str | None = None

    def __post_init__(self) -> None:
        memory_bytes(self.memory)

    @property
    def memory_bytes(self) -> int:
        """Return the limit of `memory`; 0 where none is given."""
        return memory_bytes(self.memory)


def memory_bytes(memory: int | str | None) -> int:
    """Return the bytes of a limit such as `4GiB` or `4GB`, 0 for None. Raises ValueError."""
    if memory is None:
        return 0
    size = memory
    if isinstance(size, str):
        match = re.fullmatch(r"([0-9]{1,15}) ?(?:([KMGT])i?B?)?", size.strip())
        if match is None:
            raise ValueError(f"memory is a number of bytes, or like 4GiB, not {memory!r}")
        size = int(match[1]) << 10 * (" KMGT".index(match[2]) if match[2] else 0)
    if size < _LEAST_MEMORY:
        raise ValueError(f"memory is at least {_LEAST_MEMORY >> 20}MiB: Python itself needs that")
    return size
