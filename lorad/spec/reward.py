"""The section `reward`: how samples are scored."""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lorad.spec.numbers import Part, Positive, PositiveFloat
from lorad.spec.user_code import EnvName, memory_bytes

_LABEL = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z"
_OF_JUDGE = ("url", "model", "key_file", "prompt", "range", "max_tokens", "cache", "price")
_NotNegative = Annotated[float, Meta(ge=0)]


class RewardSpec(Part, frozen=True):
    """How samples are scored; a name alone stands for `{name: …}`.

    Attributes:
        name: `exact_match`, `gsm8k`, `math`, `regex`, `reasoning_gym`, `judge`, or
            `path/to/file.py:function`.
        label: name of its curve where there are several rewards; null is the function's name.
        weight: what it is multiplied with.
        pattern: the regular expression of `regex`; for `judge`, the one whose group is the score, of which
            the last counts, by default the number behind `Score:`.
        raw: lets `regex` read the text with special tokens and the stop string, which others are given
            without.
        url: the base URL of the OpenAI API that `judge` asks, such as `http://localhost:8000/v1`.
        model: the model that `judge` asks.
        key_file: file with the API key of `judge`, readable by its owner only; null for a server without.
        prompt: what `judge` asks its model, with `{prompt}`, `{completion}` and `{answer}` in their places;
            null asks for a score from 0 to 10.
        range: lowest and highest score of `judge`, which become 0 and 1; any other is a failure.
        max_tokens: most tokens of a reply to `judge`.
        cache: directory of replies to `judge`, kept for equal questions of any run; null keeps none.
        price: what a million tokens of prompts and of replies cost with `judge`; null counts no money.
        timeout: seconds for one call of the function: for a sample, or for all that a function of lists gets.
            The first call of each process, which may load a model, has ten times that and at least a minute.
        retries: how often a sample whose reward failed is scored again.
        max_failures: share of failed samples in a step above which the run ends; 1 is never. Of several
            rewards, the least counts.
        workers: processes of user code at most; null is one for each core, up to 8, and up to 64 where calls
            have shown that they wait more than they compute, as far as memory goes.
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
    raw: bool = False
    url: Annotated[str, Meta(pattern=r"^https?://[^\s/?#@]+[^\s?#@]*\Z")] | None = None
    model: str | None = None
    key_file: str | None = None
    prompt: str | None = None
    range: tuple[float, float] = (0.0, 10.0)
    max_tokens: Positive = 256
    cache: str | None = None
    price: tuple[_NotNegative, _NotNegative] | None = None
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
        if self.pattern is not None and self.name not in ("regex", "judge"):
            raise ValueError(f"pattern is for regex and judge, not for {self.name}")
        if self.raw and self.name != "regex":
            raise ValueError(f"raw is for regex, not for {self.name}; a function asks for raw_completion")
        if self.name != "judge":
            plain = RewardSpec.__struct_defaults__
            usual = dict(zip(RewardSpec.__struct_fields__, plain, strict=True))
            if misplaced := [key for key in _OF_JUDGE if getattr(self, key) != usual[key]]:
                raise ValueError(f"{misplaced[0]} is for judge, not for {self.name}")
        elif lacking := [key for key in ("url", "model") if getattr(self, key) is None]:
            raise ValueError(f"{lacking[0]} is missing for judge")
        elif self.sandbox != "none":
            raise ValueError("sandbox has no network, by which judge asks its model")
        elif not (all(map(math.isfinite, self.range)) and self.range[0] < self.range[1]):
            raise ValueError("range is the lowest score and the highest")
        elif self.prompt is not None and "{completion}" not in self.prompt:
            raise ValueError("prompt has no {completion}, so that every sample would be the same")
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


def rewards_of(rewards: str | RewardSpec | list[str | RewardSpec]) -> list[RewardSpec]:
    """Return the rewards that a key holds."""
    several = rewards if isinstance(rewards, list) else [rewards]
    return [RewardSpec(name=one) if isinstance(one, str) else one for one in several]
