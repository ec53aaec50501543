"""The receivers of notifications that a spec names, or those of config.yaml where it names none."""

from pathlib import Path

from lorad.errors import SpecError
from lorad.notify.deliver import refuse_unfit
from lorad.spec.model import Spec
from lorad.spec.notify import Notify


def check_receivers(spec: Spec, usual: list[Notify], cwd: Path) -> list[Notify]:
    """Return who hears of the run, by its spec or as usual by config.yaml. Raises SpecError, by key."""
    if spec.notify is not None:
        refuse_unfit(spec.notify, cwd)
        return spec.notify
    try:
        refuse_unfit(usual, cwd)
    except SpecError as error:
        raise error.at("config.yaml") from None
    return usual
