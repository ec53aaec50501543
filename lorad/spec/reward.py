"""The section `reward`: how samples are scored."""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lorad.spec.numbers import Part, Positive, PositiveFloat
from lorad.spec.user_code import EnvName, memory_bytes

_LABEL = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z"


class RewardSpec(Part, frozen=True):
    """How samples are scored; a name alone stands for `{name: …}`.

    Attributes:
        name: `exact_match`, `gsm8k`, `math`, `regex`, `reasoning_gym`, or `path/to/file.py:function`.
        label: name of its curve where there are several rewards; null is the function's name.
        weight: what it is multiplied with.
        pattern: the regular expression of `regex`.
        timeout: seconds for one call of the function: for a sample, or for all that a function of lists gets.
        retries: how often a sample whose reward failed is scored again.
        max_failures: share of failed samples in a step above which the run ends; 1 is never. Of several
            rewards, the least counts.
        workers: processes of user code at most; null is one for each core, up to 8.
        concurrency: calls under way in each process, of an `async def`.
        batch_size: samples that a function of lists gets at once, at least; always whole groups. null is one
            group.
        python: interpreter that runs user code, with packages of its own, from Python 3.10 on; null is
            lorad's.
        env: variables that user code finds beside those that every program needs; no secret is there unless
            named here.
        sandbox: bubblewrap runs user code without network, home and other processes, and shows them the
            system, the interpreter and the folder of the file, read-only; it has to be installed.
        memory: limit of each process of user code, in bytes or as in `4GiB`; null is half of the machine's
            memory.
    """

    name: str = "exact_match"
    label: Annotated[str, Meta(pattern=_LABEL)] | None = None
    weight: float = 1.0
    pattern: str | None = None
    timeout: PositiveFloat = 10.0
    retries: Annotated[int, Meta(ge=0, le=10)] = 1
    max_failures: Annotated[float, Meta(ge=0, le=1)] = 0.3
    workers: Annotated[int, Meta(ge=1, le=256)] | None = None
    concurrency: Annotated[int, Meta(ge=1, le=4096)] = 64
    batch_size: Positive | None = None
    python: str | None = None
    env: list[EnvName] = msgspec.field(default_factory=list)
    sandbox: Literal["none", "bubblewrap"] = "none"
    memory: int | str | None = None

    def __post_init__(self) -> None:
        if self.pattern is not None and self.name != "regex":
            raise ValueError(f"pattern is for regex, not for {self.name}")
        if self.python is not None and ":" not in self.name and self.name not in ("math", "reasoning_gym"):
            raise ValueError(
                f"python is for math, reasoning_gym and a function of a file, not for {self.name}"
            )
        if not math.isfinite(self.weight):
            raise ValueError("weight is no number")
        memory_bytes(self.memory)

    @property
    def curve(self) -> str:
        """Return the name of its component where there are several rewards."""
        return self.label or self.name.rpartition(":")[2]

    @property
    def memory_bytes(self) -> int:
        """Return the limit of `memory`; 0 where none is given."""
        return memory_bytes(self.memory)


def rewards_of(given: str | RewardSpec | list[str | RewardSpec]) -> list[RewardSpec]:
    """Return the rewards that a key holds."""
    several = given if isinstance(given, list) else [given]
    return [RewardSpec(name=one) if isinstance(one, str) else one for one in several]
