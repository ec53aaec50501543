"""The section `expect`: figures that a run should come to."""

from typing import Annotated

from msgspec import Meta

from lorad.bounds import METRIC_NAME
from lorad.spec.numbers import NonNegative, Part

EXPECTATIONS = 32  # of a run at most


class Expectation(Part, frozen=True):
    """A figure that the run should come to: at least `low`, at most `high`, or both.

    Attributes:
        metric: of an evaluation `eval`, `eval/NAME`, `eval/NAME/pass@4`, `nll` or `accuracy`, as in
            checkpoint.best_by; of a step any that `lorad metrics` shows, such as `reward`.
        step: the step after which it is judged, of evaluations also 0; null is the last one.
        low: the least value that is expected.
        high: the highest value that is expected.
        source: who published or measured it.
    """

    metric: Annotated[str, Meta(min_length=1, max_length=METRIC_NAME)]
    step: NonNegative | None = None
    low: float | None = None
    high: float | None = None
    source: Annotated[str, Meta(max_length=200)] = ""
