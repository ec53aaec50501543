"""The types of keys, such as numbers with bounds, and the base class of sections."""

from typing import Annotated, Any

from msgspec import Meta, Struct

COUNT_LIMIT = 2**31 - 1
Positive = Annotated[int, Meta(gt=0, le=COUNT_LIMIT)]
NonNegative = Annotated[int, Meta(ge=0, le=COUNT_LIMIT)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Probability = Annotated[float, Meta(ge=0, lt=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"  # for runs, groups, aliases
BUILTIN_MODELS = ("builtin:tiny", "builtin:tiny-moe")
HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?"
Tag = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/=+@-]{0,39}\Z")]  # a word on a run
Loggers = list[str | dict[str, dict[str, Any] | None]]  # names, or one name with its settings


class Part(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of the spec."""
