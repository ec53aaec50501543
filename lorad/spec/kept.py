"""The sections `eval`, `expect` and `checkpoint`: what is measured, expected and kept of a run."""

from typing import Annotated

import msgspec
from msgspec import Meta

from lorad.bounds import METRIC_NAME
from lorad.spec.numbers import NonNegative, NonNegativeFloat, Part, Positive, PositiveFloat
from lorad.spec.reward import RewardSpec

EXPECTATIONS = 32  # of a run at most
MAIN = "main"  # the evaluation of `data.eval`, where sets are named


class EvalSet(Part, frozen=True):
    """One more set of held-out problems, with a reward and a way of sampling of its own.

    Attributes:
        data: a builtin task, a file of rows, or a hub dataset, as in data.eval.
        reward: how its completions are scored; null is the run's.
        problems: how many of its problems are evaluated; null is eval.problems.
        n: completions of each problem; with several, pass@k is measured besides, for 1, 2, 4, … and n.
        pass_at: reward from which a completion has passed.
        temperature: sampling temperature; 0 is greedy. Seeds are the same at each step and in each run.
        top_p: smallest set of tokens with this probability that is sampled from; 1 is all.
        top_k: number of likeliest tokens that are sampled from; 0 is all.
        max_new_tokens: longest completion, in tokens; null is the run's.
        every: steps between two evaluations of this set, a multiple of eval.every, which null is.
        prompt_key: column that holds its prompts; null is the run's.
        answer_key: column that holds its answers; null is the run's.
    """

    data: str
    reward: str | RewardSpec | Annotated[list[str | RewardSpec], Meta(min_length=1)] | None = None
    problems: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    pass_at: float = 1.0
    temperature: NonNegativeFloat = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    max_new_tokens: Positive | None = None
    every: Positive | None = None
    prompt_key: str | None = None
    answer_key: str | None = None


class EvalStop(Part, frozen=True):
    """When a run ends early: its evaluations, by checkpoint.best_by, have no new best any more.

    Attributes:
        patience: evaluations without a new best after which the run ends.
        min_delta: by how much one has to be better to count as a new best.
    """

    patience: Positive = 3
    min_delta: NonNegativeFloat = 0.0


class Eval(Part, frozen=True):
    """Greedy evaluation on held-out problems, before training, during it and at the end.

    Attributes:
        every: steps between two evaluations; 0 is never.
        problems: how many problems are evaluated.
        sets: further sets by name, each with data, reward and sampling of its own.
        stop: ends the run when its evaluations do not get better; null is never.
    """

    every: NonNegative = 10
    problems: Positive = 256
    sets: dict[str, EvalSet] = msgspec.field(default_factory=dict)
    stop: EvalStop | None = None


class Expectation(Part, frozen=True):
    """A figure that the run should come to: at least `low`, at most `high`, or both.

    Attributes:
        metric: a figure of an evaluation (`eval`, `eval/NAME`, `eval/NAME/pass@4`, `nll`, `accuracy`, as in
            checkpoint.best_by), or one of a step that `lorad metrics` shows, such as `reward`.
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


class Checkpoint(Part, frozen=True):
    """Checkpoints during the run and at its end, and what stays of its files.

    Attributes:
        every: steps between two checkpoints.
        minutes: a checkpoint also after the first step that ends so long after the last one, or after the
            attempt's beginning; null is by steps alone. What is trained does not depend on it.
        keep: newest checkpoints that stay; 0 is all.
        keep_best: best evaluations whose versions and checkpoints stay besides; each of these gets a
            checkpoint.
        best_by: what RUN@best, keep_best and eval.stop go by: `eval` is the reward of the main evaluation,
            `eval/NAME` that of a set, `eval/NAME/pass@4` its pass@k; nll and accuracy are of held-out
            completions. null is the first of these that is measured.
        keep_versions: newest versions whose files stay though nothing refers to them; 0 is all.
        keep_samples: newest steps whose samples stay; 0 is all.
        keep_evals: newest evaluations whose completions stay; 0 is all.
    """

    every: Positive = 10
    minutes: PositiveFloat | None = None
    keep: NonNegative = 3
    keep_best: Annotated[int, Meta(ge=0, le=1000)] = 0
    best_by: str | None = None
    keep_versions: NonNegative = 64
    keep_samples: NonNegative = 1000
    keep_evals: NonNegative = 100
