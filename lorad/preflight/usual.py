"""What a spec leaves to config.yaml: its loggers, and who hears of the run."""

from collections.abc import Callable
from typing import TypeVar

from lorad.errors import SpecError

T = TypeVar("T")


def own_or_usual(own: T | None, usual: T, refuse_unfit: Callable[[T], None]) -> T:
    """Return what the spec names, or what config.yaml does where it names nothing.

    Raises SpecError, by key, where `refuse_unfit` does.
    """
    if own is not None:
        refuse_unfit(own)
        return own
    try:
        refuse_unfit(usual)
    except SpecError as error:
        raise error.at("config.yaml") from None
    return usual
