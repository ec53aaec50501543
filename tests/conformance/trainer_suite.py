"""The rules of `lorad.trainers.base`, as tests: a backend passes when a subclass with its own `make_trainer`
does.
"""

from tests.conformance.trainer_checkpoints import Checkpoints
from tests.conformance.trainer_critics import Critics
from tests.conformance.trainer_gradients import Gradients, Steps
from tests.conformance.trainer_losses import Losses
from tests.conformance.trainer_many import Many
from tests.conformance.trainer_masks import Masks, Ratios
from tests.conformance.trainer_numbers import Numbers
from tests.conformance.trainer_slots import Slots
from tests.tinker.trainer_labels import Labels


class PolicySuite(Numbers, Gradients, Steps, Losses, Labels, Masks, Ratios, Slots, Many, Checkpoints):
    """Every rule of a trainer that has no critics; fixtures and tolerances are those of `TrainerCase`."""


class TrainerSuite(PolicySuite, Critics):
    """Every rule."""


class Base(Numbers, Slots, Many):
    """The rules that hang on how a base computes: of another base `make test` has these alone."""


class Rest(Gradients, Steps, Masks, Ratios, Checkpoints, Critics):
    """The others, for `make test-system`."""


class OfLosses(Losses, Labels):
    """Those for which a base is log-probabilities alone: `long` where CI has them of another base."""
