"""The user's own loss and advantage: loaded, and tried on a few made-up samples."""

import os
from collections.abc import Sequence
from pathlib import Path

from lorad.driver.user.functions import UserFunctions
from lorad.errors import SpecError
from lorad.spec.algorithm import Algorithm

_UNSET = (
    "Give it to the daemon, in its environment or by `secrets` of config.yaml; your shell's does not count."
)


def refuse_unset(names: Sequence[str], key: str) -> None:
    """Raises SpecError where a variable that user code needs is not set."""
    if unset := [name for name in names if name not in os.environ]:
        raise SpecError(f"{', '.join(unset)} is not set where runs work", key=key, hint=_UNSET)


def check_functions(algorithm: Algorithm, cwd: Path) -> None:
    """The functions are there, take what they are given and return what they should. Raises SpecError."""
    refuse_unset(algorithm.user_code.env, "algorithm.user_code.env")
    with UserFunctions(algorithm, cwd) as functions:
        for function in functions.all:
            function.start()
            function.try_out(with_reference=algorithm.has_reference)
