"""Numbers with bounds, as a spec and requests have them."""

from typing import Annotated

from msgspec import Meta

COUNT_LIMIT = 2**31 - 1
Positive = Annotated[int, Meta(gt=0, le=COUNT_LIMIT)]
NonNegative = Annotated[int, Meta(ge=0, le=COUNT_LIMIT)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
