"""The sections `eval` and `checkpoint`: what is measured during a run, and what stays of its files."""

from lorad.spec.numbers import NonNegative, Part, Positive


class Eval(Part, frozen=True):
    """Greedy evaluation on held-out problems, before training, during it and at the end.

    Attributes:
        every: steps between two evaluations; 0 is never.
        problems: how many problems are evaluated.
    """

    every: NonNegative = 10
    problems: Positive = 256


class Checkpoint(Part, frozen=True):
    """Checkpoints during the run and at its end, and what stays of its files.

    Attributes:
        every: steps between two checkpoints.
        keep: newest checkpoints that stay; 0 is all.
        keep_versions: newest versions whose files stay though nothing refers to them; 0 is all.
        keep_samples: newest steps whose samples stay; 0 is all.
    """

    every: Positive = 10
    keep: NonNegative = 3
    keep_versions: NonNegative = 64
    keep_samples: NonNegative = 1000
