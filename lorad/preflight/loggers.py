"""The loggers of a spec, or those of config.yaml where it names none."""

from lorad.errors import SpecError
from lorad.loggers.choose import refuse_unfit
from lorad.spec.model import Spec
from lorad.spec.numbers import Loggers


def check_loggers(spec: Spec, usual: Loggers) -> Loggers:
    """Return the loggers of the run, or the usual ones of config.yaml. Raises SpecError, by key."""
    if spec.loggers is not None:
        refuse_unfit(spec.loggers)
        return spec.loggers
    try:
        refuse_unfit(usual)
    except SpecError as error:
        raise error.at("config.yaml") from None
    return usual
